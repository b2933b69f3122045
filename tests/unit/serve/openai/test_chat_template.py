"""Chat templates: rendered as transformers does, in a sandbox."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trtrun.chats import chat_template
from trtrun.chats.chat_template import ChatTemplate, read_chat_template
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


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none %}You may call: {{ tools | tojson }}{% endif %}{{ messages[0].content }}",
        "{% if documents is none %}no docs{% else %}docs{% endif %}",
        "{{ tools is defined }} {{ documents is defined }} {{ tools or 'nothing' }}",
    ],
)
def test_what_a_chat_does_not_have_is_none_as_in_transformers(tmp_path: Path, source: str) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    (theirs,), _ = transformers.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True
    )
    assert template_of(tmp_path, source).render(MESSAGES) == theirs


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


def test_too_little_memory_is_no_fault_of_the_messages(tmp_path: Path) -> None:
    def grow() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        template_of(tmp_path, "{{ grow() }}").render(MESSAGES, values={"grow": grow})


def test_what_is_computed_of_constants_is_computed_when_it_is_rendered(tmp_path: Path) -> None:
    """Else a short template could take any time and memory before anything bounds it, when the server starts."""
    source = "{{ 'a' * 50000000 }}"
    assert len(chat_template._environment().compile(source, raw=True)) < 5000
    template = template_of(tmp_path, source)
    with pytest.raises(InvalidRequestError, match="writes more than 16777216 characters"):
        template.render(MESSAGES)


NESTED = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"


@pytest.mark.parametrize("source", ["{% for %}", "{{", 5, {"a": 1}, NESTED, NESTED.replace("(", "[").replace(")", "]")])
def test_what_is_no_template_is_refused(tmp_path: Path, source: object) -> None:
    with pytest.raises(CheckpointError, match="template"):
        template_of(tmp_path, source)


CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content is defined and message.reasoning_content %}"
    "{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
TRIMMING = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
DOCUMENTS = (
    "{% if tools is not none %}You may call: {{ tools | tojson }}{% endif %}"
    "{% if documents is none %}no documents{% else %}{% for one in documents %}[{{ one.title }}: {{ one.text }}]"
    "{% endfor %}{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "Reasoning: {{ reasoning_effort or 'medium' }}{{ eos_token }}"
)
ALWAYS_ANSWERING = "{% for message in messages %}[{{ message.thinking }}|{{ message.content }}]{% endfor %}<answer>"
CHATS = [
    [{"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "It is  ", "reasoning_content": "\neasy\n"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": " x\n", "reasoning": "why"}],
]


@pytest.mark.parametrize("source", [CHATML, TRIMMING, DOCUMENTS, ALWAYS_ANSWERING])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize(
    ("values", "others"),
    [
        ({}, {}),
        ({}, {"add_generation_prompt": False}),
        ({}, {"add_generation_prompt": False, "continue_final_message": True}),
        ({"enable_thinking": False, "reasoning_effort": "high", "eos_token": "<end>"}, {}),
        ({}, {"documents": [{"title": "a", "text": "b"}, {"title": "<&>", "text": ""}]}),
    ],
)
def test_what_requests_say_means_what_it_means_to_transformers(
    tmp_path: Path, source: str, messages: list[dict[str, str]], values: dict[str, object], others: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = transformers.render_jinja_template(
        conversations=[messages], chat_template=source, **{"add_generation_prompt": True, **others, **tokens, **values}
    )
    assert template_of(tmp_path, source, **tokens).render(messages, **others, values=values) == theirs


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].content | upper }}"])
def test_a_message_that_the_template_does_not_write_cannot_be_gone_on_with(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message: the model's chat template"):
        template_of(tmp_path, source).render(MESSAGES, add_generation_prompt=False, continue_final_message=True)


def test_a_template_tells_which_values_it_looks_at(tmp_path: Path) -> None:
    assert {"enable_thinking", "messages"} <= template_of(tmp_path, CHATML).names
    assert "enable_thinking" not in template_of(tmp_path, TRIMMING).names


TOOL_USE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}]{% endfor %}"
    "{{ message.tool_call_id or '' }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é", "b": [1]}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]


def test_tools_and_calls_are_what_they_are_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    for tools in (TOOLS, None):
        (theirs,), _ = transformers.render_jinja_template(conversations=[CALLS], chat_template=TOOL_USE, tools=tools)
        assert template_of(tmp_path, TOOL_USE).render(CALLS, add_generation_prompt=False, tools=tools) == theirs


def test_templates_that_take_arguments_as_texts_get_these(tmp_path: Path) -> None:
    """As DeepSeek's do; what is wrong with others is said of what they were given first."""
    source = (
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}%s{% endfor %}"
    )
    with_calls = source + "{% endfor %}"
    as_text = with_calls.replace("%s", "{{ '```' + call.function.arguments + '```' }}")
    assert template_of(tmp_path, as_text).render(CALLS) == 'x```{"a": "é", "b": [1]}```y'
    assert CALLS[1]["tool_calls"][0]["function"]["arguments"] == {"a": "é", "b": [1]}  # type: ignore[index]
    broken = with_calls.replace("%s", "{{ call.function.arguments.a + call.function.arguments.b + 1 }}")
    with pytest.raises(InvalidRequestError, match=r'can only concatenate str .not "list"'):
        template_of(tmp_path, broken).render(CALLS)
    refusing = with_calls.replace("%s", "{{ raise_exception('no calls') }}")
    with pytest.raises(InvalidRequestError, match="refuses them: 'no calls'"):
        template_of(tmp_path, refusing).render(CALLS)


def test_arguments_are_json_where_the_template_writes_them_as_they_are(tmp_path: Path) -> None:
    """As Phi-4's does, which would write Python; unless it was somebody else who wrote that."""
    source = (
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        "<{{ call.function.arguments }}>{% endfor %}{% endfor %}"
    )
    assert template_of(tmp_path, source).render(CALLS) == 'x<{"a": "é", "b": [1]}>y'
    quoting = [{"role": "user", "content": "{'a': 'é', 'b': [1]}"}, *CALLS[1:]]
    assert template_of(tmp_path, source).render(quoting) == "{'a': 'é', 'b': [1]}<{\"a\": \"é\", \"b\": [1]}>y"
    as_json = source.replace("arguments }}", "arguments | tojson }}")
    assert template_of(tmp_path, as_json).render(quoting) == "{'a': 'é', 'b': [1]}<{\"a\": \"é\", \"b\": [1]}>y"
    of_objects = source.replace("arguments }}", "arguments }}{{ call.function.arguments.items() | length }}")
    assert template_of(tmp_path, of_objects).render(CALLS) == "x<{'a': 'é', 'b': [1]}2>y"


def test_arguments_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit() + 100):
        arguments = {"a": arguments}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match="messages: arguments of a call are nested too deeply"):
        template_of(tmp_path, "x").render([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_calls_without_text_are_null_where_the_template_writes_them_only_so(tmp_path: Path) -> None:
    """As DeepSeek's distilled models have it; others look at the length of a content, and would fail at null."""
    source = (
        "{% for message in messages %}{% if message['content'] is none %}{% for call in message.tool_calls %}"
        "{{ '<' + call.function.name + call.function.arguments + '>' }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    assert template_of(tmp_path, source).render(CALLS) == 'x<f{"a": "é", "b": [1]}>y'
    with_text = [CALLS[0], {**CALLS[1], "content": "I look."}, CALLS[2]]
    assert template_of(tmp_path, source).render(with_text) == "xI look.y"
    measuring = (
        "{% for message in messages %}{% if message.content is not none or message.content | length %}"
        "{{ message.content }}{% for call in message.tool_calls or [] %}<{{ call.function.arguments.a }}>{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    assert template_of(tmp_path, measuring).render(CALLS) == "x<é>y"
    refusing = source.replace("{% for call", "{{ raise_exception('null') }}{% for call").replace(
        "{{ message.content }}", "{{ message.content }}{{ raise_exception('text') if message.tool_calls }}"
    )
    with pytest.raises(InvalidRequestError, match="refuses them: 'text'"):
        template_of(tmp_path, refusing).render(CALLS)
    # Thoughts that are null say nothing of the content.
    about_thoughts = "{{ messages[1].reasoning_content is none }}{{ messages[1].content is string }}"
    assert template_of(tmp_path, about_thoughts).render(CALLS) == "FalseTrue"


def calls_of(*ids: str, **others: Any) -> dict[str, Any]:
    """An answer that calls a tool for each id, which is its argument, too."""
    calls = [{"id": one, "type": "function", "function": {"name": f"f{one}", "arguments": {"a": one}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls, **others}


def result_of(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"result {call_id}"}


FIRST_CALL = (
    "{% for message in messages %}[{{ message.thinking or '' }}|{{ message.content }}{% if message.tool_calls %}"
    "%s{% set call = message.tool_calls[0].function %}{{ call.name }}({{ call.arguments.a }}){% endif %}]{% endfor %}"
)


@pytest.mark.parametrize(
    "refusal", ["", "{% if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"]
)
def test_calls_of_one_answer_follow_each_other_where_the_template_looks_at_the_first_alone(
    tmp_path: Path, refusal: str
) -> None:
    """As gpt-oss's does, which gives a result the name of the call before it, and Llama 3's, which refuses several."""
    template = template_of(tmp_path, FIRST_CALL.replace("%s", refusal))
    answer = calls_of("1", "2", "3", content="I look.", reasoning_content="Hm.")
    asked: list[dict[str, Any]] = [CALLS[0], answer, *map(result_of, "312"), {"role": "user", "content": "z"}]
    told = "[|x][Hm.|I look.f1(1)][|result 1][|f2(2)][|result 2][|f3(3)][|result 3]"
    assert template.render(asked) == told + "[|z]"
    # Twice the same id, one that is no call's, and one too many; calls whose results are not there yet.
    odd = [calls_of("1", "1", "2"), *map(result_of, "1917")]
    assert template.render(odd) == "[|f1(1)][|result 1][|f1(1)][|result 1][|f2(2)][|result 9][|result 7]"
    assert template.render([answer]) == "[Hm.|I look.f1(1)][|f2(2)][|f3(3)]"
    assert len(asked[1]["tool_calls"]) == 3
    each = FIRST_CALL.replace("%s", "{% for one in message.tool_calls %}<{{ one.id }}>{% endfor %}")
    assert "<1><2><3>" in template_of(tmp_path, each).render(asked), "others have them together"


def test_text_beside_thoughts_and_calls_is_a_thought_where_the_template_takes_one_of_both(tmp_path: Path) -> None:
    """As gpt-oss's, which writes such a text as a thought and refuses both."""
    refusal = (
        "{% if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking in an "
        "assistant message with tool calls!') }}{% endif %}"
    )
    answer = calls_of("1", content="I look.", reasoning_content="Hm.")
    told = template_of(tmp_path, FIRST_CALL.replace("%s", refusal)).render([answer, result_of("1")])
    assert told == "[Hm.\n\nI look.|f1(1)][|result 1]"
    alone = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    assert template_of(tmp_path, FIRST_CALL.replace("%s", refusal)).render([alone]) == "[Hm.|I look.]"


@pytest.mark.parametrize("others", ["!=", "<"])
def test_ids_of_other_programs_are_short_where_the_template_refuses_others(tmp_path: Path, others: str) -> None:
    """As Mistral's do; newer ones refuse those that are shorter."""
    ids = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}%s<{{ call.id }}>{% endfor %}"
        "{% if message.role == 'tool' %}<{{ message.tool_call_id }}>{% endif %}{% endfor %}"
    )
    refusing = ids.replace("%s", "{% if call.id | length ?? 9 %}{{ raise_exception('of length 9') }}{% endif %}")
    refusing = refusing.replace("??", others)

    def render(source: str, call_id: str) -> list[str]:
        call = {**CALLS[1]["tool_calls"][0], "id": call_id}  # type: ignore[index]
        messages = [CALLS[0], {**CALLS[1], "tool_calls": [call]}, {**CALLS[2], "tool_call_id": call_id}]
        return template_of(tmp_path, source).render(messages).strip("<>").split("><")

    assert render(refusing, "abcDEF123") == ["abcDEF123"] * 2
    told, again = render(refusing, "call_1234567890")
    assert told == again and len(told) == 9 and told.isalnum()
    assert render(refusing, "call_1234567891")[0] != told
    assert len(render(refusing, "call_1")[0]) == 9
    assert render(ids.replace("%s", ""), "call_1234567890") == ["call_1234567890"] * 2


def test_ids_name_functions_where_the_template_writes_no_other_name(tmp_path: Path) -> None:
    """As Kimi K2's: those of other servers, twice the same, and none; results go by them."""
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}<{{ call.id }}"
        "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}>{% endfor %}"
        "{% if message.role == 'tool' %}[{{ message.tool_call_id }}]{% endif %}{% endfor %}"
    )
    nameless = calls_of("3")
    del nameless["tool_calls"][0]["id"]
    own = {**calls_of("4"), "tool_calls": [{**calls_of("4")["tool_calls"][0], "id": "functions.f4:7"}]}
    chat = [CALLS[0], calls_of("1", "2"), result_of("2"), result_of("1"), nameless, own, result_of("functions.f4:7")]
    told = template_of(tmp_path, source).render([*chat, result_of("nobody's")])
    begun = [part.partition("<|")[0] for part in told.split("<") if part.startswith("functions")]
    assert begun == ["functions.f1:0", "functions.f2:1", "functions.f3:2", "functions.f4:7"]
    results = ["functions.f2:1", "functions.f1:0", "functions.f4:7", "nobody's"]
    assert [part.partition("]")[0] for part in told.split("[")[1:]] == results


def test_developers_are_the_system_where_the_template_has_none(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    of_any = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    of_known = (
        "{% for message in messages %}{% if message.role in ('system', 'user') %}{{ message.content }}"
        "{% else %}{{ raise_exception('of no role') }}{% endif %}{% endfor %}"
    )
    of_developers = of_any + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert template_of(tmp_path, of_any).render(messages) == "<system>Be brief.<user>x"
    assert template_of(tmp_path, of_known).render(messages) == "Be brief.x"
    assert template_of(tmp_path, of_developers).render(messages) == "<developer>Be brief.<user>x!"
    in_words = of_any + "I was made by a developer."
    assert template_of(tmp_path, in_words).render(messages).startswith("<system>")
    # Of two templates, the one that is used says it.
    named = [{"name": "tool_use", "template": of_developers}, {"name": "default", "template": of_any}]
    template = template_of(tmp_path, named)
    assert template.render(messages, tools=TOOLS).startswith("<developer>")
    assert template.render(messages).startswith("<system>")


def test_chats_with_tools_have_the_template_for_them(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    template = template_of(tmp_path, named)
    assert (template.render(MESSAGES, tools=TOOLS), template.render(MESSAGES)) == ("tools", "default")
    assert (template.source, template.tool_source) == ("default", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")  # which is of all chats
    assert template_of(tmp_path, named).render(MESSAGES, tools=TOOLS) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    template = template_of(tmp_path, "plain")
    assert (template.render(MESSAGES, tools=TOOLS), template.render(MESSAGES)) == ("file for tools", "file")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    with pytest.raises(CheckpointError, match="chat_template must be a text, not 5"):
        template_of(tmp_path, [{"name": "default", "template": "x"}, {"name": "tool_use", "template": 5}])
