"""Chat templates as families of models have them, as far as calls and thoughts go; none of their wording."""

_HEAD = "{% for message in messages %}# {{ message.role }}\n{{ message.content }}"
_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
_TAIL = "\n{% endfor %}{% if add_generation_prompt %}# answer\n{% endif %}"
PLAIN = _TOOLS + _HEAD + _TAIL
HERMES = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}" + _TAIL
)
QWEN3_CODER = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}" + _TAIL
)
QWEN3 = HERMES + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
DEEPSEEK = PLAIN + "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}{# </think> #}"
LLAMA = (
    _TOOLS + _HEAD + '{# <|python_tag|> #}{% for call in message.tool_calls or [] %}{"name": "'
    '{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}' + _TAIL
)
MISTRAL = (
    _TOOLS + _HEAD + "{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]{% endif %}" + _TAIL
)
MISTRAL_NEW = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}" + _TAIL
)
DEEPSEEK_V3 = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}"
    "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}\n```json\n"
    "{{ '' + call.function.arguments }}\n```<｜tool▁call▁end｜>"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}{% endfor %}" + _TAIL
)
NEMOTRON = (
    _TOOLS + _HEAD + "{% if message.tool_calls %}<TOOLCALL>[{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}" + _TAIL
)
GLM45 = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for name, value in call.function.arguments | items %}<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}" + _TAIL + "{# </think> #}"
)
GLM47 = GLM45.replace("\n<tool_call>", "<tool_call>").replace(" }}\n{% for name", " }}{% for name")
GLM47 = GLM47.replace("</arg_key>\n", "</arg_key>").replace("</arg_value>\n", "</arg_value>")
MINIMAX = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}{{ '\n<minimax:tool_call>\n' if loop.first }}"
    '<invoke name="{{ call.function.name }}">\n{% for name, value in call.function.arguments | items %}'
    '<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n"
    "{{ '</minimax:tool_call>' if loop.last }}{% endfor %}" + _TAIL
)
DSML = MINIMAX.replace("</", "</｜DSML｜").replace("<minimax:tool_call", "<｜DSML｜function_calls")
DSML = DSML.replace("</｜DSML｜minimax:tool_call", "</｜DSML｜function_calls").replace("<invoke", "<｜DSML｜invoke")
DSML = DSML.replace(
    '<parameter name="{{ name }}"', '<｜DSML｜parameter name="{{ name }}" string="{{ (value is string) | lower }}"'
)
KIMI = (
    _TOOLS + _HEAD + "{% for call in message.tool_calls or [] %}{{ '<|tool_calls_section_begin|>' if loop.first }}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
    "<|tool_call_end|>{{ '<|tool_calls_section_end|>' if loop.last }}{% endfor %}" + _TAIL
)
HARMONY = (
    _TOOLS + "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
