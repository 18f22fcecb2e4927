"""tokenizer.chat against the chat templates of transformers.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
from transformers import PreTrainedTokenizerFast

import convert_weights as cw
import tokenizer
from checkpoints import edit, fallback_folder, hf_folder, one_thread  # noqa: F401 (autouse)
from model import read_config


@pytest.fixture
def hf(tmp_path):
    return hf_folder(tmp_path / "hf")


TEMPLATE = ("{{ bos_token }}{% for m in messages %}\n"
            "    {% if m.role == 'bad' %}\n{{ raise_exception('no such role') }}\n    {% endif %}\n"
            "<think>{{ m.role }}\n{{ m.content | trim }}e<|im_end|>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}bot:{% endif %}")


def test_chat_equals_transformers(hf, tmp_path):
    """Kills: no trim_blocks; sentinel in the way of `trim`; template and content encoded apart; BOS twice."""
    edit(hf, "tokenizer_config.json", chat_template=[{"name": "tool", "template": "x"},
                                                     {"name": "default", "template": TEMPLATE}])
    cw.convert(str(hf), tmp_path / "out")
    tok, template = tokenizer.load(tmp_path / "out"), read_config(tmp_path / "out")["chat_template"]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hf / "tokenizer.json"), bos_token="<s>", chat_template=template)
    contents = {"user": "  the them \n", "bot": "", "é": " 12🙂"}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    for prompt in (True, False):
        want = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.chat(template, messages, tok, prompt) == want
    no_bos = tokenizer.chat(TEMPLATE.replace("{{ bos_token }}", ""), messages, tok, False)
    assert no_bos == want and no_bos.count(tok.bos) == 1


def test_messages_cannot_forge_special_tokens(hf, tmp_path):
    """Whole, split over two messages, or completed by the template's own text.
    Kills: specials matched in the rendered text; guards inside contents but none at their borders."""
    cw.convert(str(hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}im_end|><|im_end|>"
    end, plain = tok.special_tokens["<|im_end|>"], "im_end|>"
    for contents in (["<|im_end|>"], ["<|im_", "end|>"], ["a<|"], ["<<s><|im_end|><|"], [" <s> "],
                     ["\U000f0000<s>\U000f0001"]):
        ids = tokenizer.chat(template, [{"role": "u", "content": c} for c in contents], tok)
        assert ids == [tok.bos, *tok.encode("".join(contents) + plain), end]
    for bad in ([{"role": "<s>", "content": ""}], [{"role": "u"}], [{"role": "u", "content": ["x"]}],
                [{"role": "u", "content": "x", "name": "<s>"}]):
        with pytest.raises(ValueError, match="special token <s>|a chat message is"):
            tokenizer.chat(template, bad, tok)


@pytest.mark.parametrize("template, message", [
    (None, "no chat template"), (TEMPLATE, "no such role"), ("{% if", "refuses"), ("{{ 1 // 0 }}", "refuses"),
    ("{{ messages.append(1) }}", "refuses"), ("{{ ''.__class__.__mro__ }}", "refuses"), ("{{ x.y.z }}", "refuses")])
def test_templates_that_fail_are_one_clear_error(hf, tmp_path, template, message):
    """Kills: a plain jinja2.Environment (runs what the sandbox refuses); only TemplateError caught."""
    cw.convert(str(hf), tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        tokenizer.chat(template, [{"role": "bad", "content": "x"}], tokenizer.load(tmp_path / "out"))