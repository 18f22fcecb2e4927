"""tokenizer.chat against the chat templates of transformers.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json

import pytest
from transformers import PreTrainedTokenizerFast

import convert_weights as cw
import tokenizer
from checkpoints import edit, fallback_folder, hf_folder, one_thread, unfold  # noqa: F401 (autouse)
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


# The shapes of the well-known templates, written for this test.
INST = ("{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}"
        "{{ START + '[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}")
HEADERS = ("{{- bos_token }}\n{%- for m in messages %}\n    {{- '<|end|>' + m['role'] + '\\n\\n' + m['content'] | trim "
           "+ '<|end|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|end|>assistant\\n\\n' }}\n"
           "{%- endif %}")
CHATML = ("{%- if messages[0].role != 'system' %}{{ '<|end|>system\nYou help.<|end|>\n' }}{% endif -%}"
          "{% for m in messages %}{% generation %}{{ '<|end|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}"
          "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '<|end|>assistant\n' }}{% endif %}")
THINKING = ("{%- set ns = namespace(last=0) %}{% for m in messages %}"
            "{% if m.role == 'user' and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}<|end|>{{ m.role }}\n"
            "{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ text }}<|end|>\n{% endfor %}")
ZEPHYR = ("{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
          "{% else %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endif %}\n"
          "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}")
SHAPES = {"Llama 2": INST.replace("START", "bos_token"), "Llama 3": HEADERS, "Qwen 2.5": CHATML, "Qwen 3": THINKING,
          "Mistral": "{{ bos_token }}" + INST.replace("START +", ""), "Zephyr": ZEPHYR}
TURNS = [{"role": "user", "content": "<tool> the \nof 12</tool>"},
         {"role": "assistant", "content": "is </think>\n\n there  "}, {"role": "user", "content": ">them|"}]


@pytest.mark.parametrize("rule", ["prepend", "always", "first", "bytes"])
def test_well_known_templates_equal_transformers(tmp_path, rule):
    """With and without a system message, one turn and three; BOS exactly once at the start, written or not.
    Kills: the blank after a special token left out, or put in where the rule is "first"; BOS twice; no
    {% generation %}; blanks after rstrip and before lstrip kept; a fence where no special can form."""
    def flags(raw):
        raw["added_tokens"][2] |= {"lstrip": True, "rstrip": True}
        return raw if rule == "bytes" else unfold(raw, rule)

    if rule == "bytes":
        hf_folder(tmp_path / "hf")
        raw = json.loads((tmp_path / "hf/tokenizer.json").read_text().replace("<|im_end|>", "<|end|>"))
        edit(tmp_path / "hf", "tokenizer.json", **flags(raw))
    else:
        fallback_folder(tmp_path / "hf", flags)
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    for name, template in SHAPES.items():
        names = {"bos_token": tok.bos_token, "eos_token": tok.eos_token}
        file = str(tmp_path / "hf/tokenizer.json")
        theirs = PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, **names)
        for system in ([], [{"role": "system", "content": "Be  the "}]):
            for turns in (TURNS[:1], TURNS):
                ids = tokenizer.chat(template, system + turns, tok)
                want = theirs.apply_chat_template(system + turns, add_generation_prompt=True, return_dict=False)
                assert ids == want if want[:1] == [tok.bos] else ids == [tok.bos, *want], name
                assert ids[0] == tok.bos != ids[1]


@pytest.mark.parametrize("files, want", [
    ({"chat_template.jinja": "J", "chat_template.json": '{"chat_template": "S"}'}, "J"),
    ({"chat_template.json": '{"chat_template": "S"}', "additional_chat_templates/tool.jinja": "x"}, "S"), ({}, "C")])
def test_where_a_template_comes_from(hf, tmp_path, files, want):
    """Kills: a file of its own ignored; the config's before the file's."""
    edit(hf, "tokenizer_config.json", chat_template="C")
    (hf / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (hf / name).write_text(text)
    cw.convert(str(hf), tmp_path / "out")
    assert read_config(tmp_path / "out")["chat_template"] == want


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
    for content, around in (("im_", "<|{}end|>"), ("end|> x", "<|im_{}"), ("x <|im_", "{}end|>")):
        template = around.replace("{}", "{{ messages[0].content }}")
        assert tokenizer.chat(template, [{"role": "u", "content": content}], tok) == tok.prompt(around.format(content))
    for bad in ([{"role": "<s>", "content": ""}], [{"role": "u"}], [{"role": "u", "content": ["x"]}],
                [{"role": "u", "content": "x", "name": "<s>"}]):
        with pytest.raises(ValueError, match="special token <s>|a chat message is"):
            tokenizer.chat(template, bad, tok)


@pytest.mark.parametrize("template, message", [
    (None, "no chat template"), (TEMPLATE, "no such role"), ("{% if", "refuses"), ("{{ 1 // 0 }}", "refuses"),
    ("{{ messages.append(1) }}", "refuses"), ("{{ ''.__class__.__mro__ }}", "refuses"), ("{{ x.y.z }}", "refuses"),
    ("{{ range(10 ** 9) | list }}", "too big"), ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    ("{{ 1 | nothing }}", "nothing"),
    ("{{ raise_exception('a\n\nb') }}", "a b"), ("{{ raise_exception.__globals__.os }}", "unsafe"),
    ("{{ namespace.__init__.__globals__['os'] }}", "refuses"), ("{{ cycler.__init__.x }}", "unsafe"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"), ("{% include 'x' %}", "refuses")])
def test_templates_that_fail_are_one_clear_error(hf, tmp_path, template, message):
    """Kills: a plain jinja2.Environment (runs what the sandbox refuses); only TemplateError caught; its lines kept."""
    cw.convert(str(hf), tmp_path / "out")
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.chat(template, [{"role": "bad", "content": "x"}], tokenizer.load(tmp_path / "out"))
    assert "\n" not in str(caught.value)