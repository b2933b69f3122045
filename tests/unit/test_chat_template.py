"""Chat templates: rendered as transformers does, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.serve.chat_template import ChatTemplate, read_chat_template
from trtrun.errors import CheckpointError, InvalidRequestError


def template_of(folder: Path, source: object, **config: object) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    template = read_chat_template(folder)
    assert template is not None
    return template


MESSAGES = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "<b>"}]


def test_templates_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n  {% if loop.first %}\n[{{ message['role'] }}]{% endif %}\n"
        "{% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
        "{% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{% endfor %}\n{% if add_generation_prompt %}<go>{{ eos_token }}{% endif %}"
    )
    template = template_of(tmp_path, source, bos_token="<s>", eos_token={"content": "</s>"})
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    (theirs,), _ = transformers.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert template.render(MESSAGES) == theirs


def test_the_file_goes_first_and_default_is_taken_of_several(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    assert template_of(tmp_path, named).render(MESSAGES) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template_of(tmp_path, named).render(MESSAGES) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set x = messages.__class__ %}{{ x() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ nothing.more }}",
    ],
)
def test_templates_stay_in_their_sandbox(tmp_path: Path, source: str) -> None:
    template = template_of(tmp_path, source)
    messages_before = json.dumps(MESSAGES)
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template") as caught:
        template.render(MESSAGES)
    assert "\n" not in str(caught.value) and json.dumps(MESSAGES) == messages_before


def test_a_template_says_itself_why_it_refuses(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ raise_exception('no system here') }}")
    with pytest.raises(InvalidRequestError, match="chat template refuses them: 'no system here'"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", ["{% for %}", "{{", 5, {"a": 1}])
def test_what_is_no_template_is_refused(tmp_path: Path, source: object) -> None:
    with pytest.raises(CheckpointError, match="template"):
        template_of(tmp_path, source)
