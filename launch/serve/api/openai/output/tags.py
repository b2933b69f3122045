"""The marks between which families of models write a call's name and each of its arguments, these as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from launch.serve.api.openai.output.object_calls import CLOSE, OPEN

_NAME = "[^<>\\n]{1,256}"
_QUOTED = '[^<>\\n"]{1,256}'
_BLANKS = "\\s{0,8}"
_LETTERS = "[a-z_]{0,9}"


@dataclass(frozen=True)
class Tags:
    """How calls are written, in the order of a call.

    Attributes:
        open, close: around a call, or around all of them.
        holds_all: they are around all calls of an answer.
        call: in front of a name, with what precedes it; empty where the name follows `open` at once.
        call_end: behind a name.
        parameter: in front of an argument's name.
        text_opening, other_opening: between that name and its value, a text or another one.
        end_parameter: behind a value.
        end: behind a call's arguments; empty where `close` is.
        line: what each argument ends with.
        between: what stands between two calls that are marked each.
        has_lines: a value stands on lines of its own.
        name_pattern, key_pattern: what is read of both, each a regular expression with a group for the name; that of a
            key may have another one, which says `true` of a text and `false` of another value.
        name_begun, key_begun: what may become these.
        tokens: other tokens that marks are written with.
    """

    open: str
    close: str
    holds_all: bool
    call: str
    call_end: str
    parameter: str
    text_opening: str
    other_opening: str
    end_parameter: str
    end: str
    name_pattern: str
    name_begun: str
    key_pattern: str
    key_begun: str
    line: str = "\n"
    between: str = ""
    has_lines: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        return self.open, self.close, *self.tokens

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Marks that a call begins with."""
        return (self.open, self.call) if self.call else (self.open,)

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that a call ends with."""
        return (self.end, self.close) if self.end else (self.close,)

    @cached_property
    def name(self) -> re.Pattern[str]:
        """A call's name, with the marks beside it."""
        return re.compile(self.name_pattern)

    @cached_property
    def may_be_name(self) -> re.Pattern[str]:
        """What may become that."""
        return re.compile(self.name_begun)

    @cached_property
    def key(self) -> re.Pattern[str]:
        """An argument's name, with the marks beside it."""
        return re.compile(self.key_pattern)

    @cached_property
    def may_be_key(self) -> re.Pattern[str]:
        """What may become that."""
        return re.compile(self.key_begun)

    @cached_property
    def next_key(self) -> re.Pattern[str]:
        """The next argument's name, in front of which a value ends that has no mark of its own."""
        return re.compile(f"\n?{self.key_pattern}" + ("\n" if self.has_lines else ""))

    @cached_property
    def may_be_next_key(self) -> re.Pattern[str]:
        """What may become that."""
        return re.compile(f"\n?{self.key_begun}>?")

    @cached_property
    def call_close(self) -> re.Pattern[str]:
        """The end of a call, in front of which such a value ends, too."""
        end = f"({re.escape(self.end)}\\s{{0,64}})?" if self.end else "()"
        return re.compile(f"\n?{end}{re.escape(self.close)}")

    @cached_property
    def ends_of_values(self) -> tuple[str, ...]:
        """Marks that a value may end with, or in front of."""
        own = (f"\n{self.end_parameter}",) if self.has_lines else ()
        behind = tuple(f"\n{mark}" for mark in (self.parameter, *self.ends))
        # Of a form in lines a text may hold the beginning of another argument within a line.
        return (*own, self.end_parameter, *behind, *self.ends, *(() if self.has_lines else (self.parameter,)))


QWEN3_CODER = Tags(
    open=OPEN,
    close=CLOSE,
    holds_all=False,
    call="<function=",
    call_end=">\n",
    parameter="<parameter=",
    text_opening=">\n",
    other_opening=">\n",
    end_parameter="</parameter>",
    end="</function>",
    name_pattern=f"<function=({_NAME})>",
    name_begun="<function=[^<>\\n]{0,256}",
    key_pattern=f"<parameter=({_NAME})>",
    key_begun="<parameter=[^<>\\n]{0,256}",
    between="\n",
    has_lines=True,
)


def _glm(line: str) -> Tags:
    """GLM's, with what stands behind names and arguments."""
    return Tags(
        open=OPEN,
        close=CLOSE,
        holds_all=False,
        call="",
        call_end=line,
        parameter="<arg_key>",
        text_opening=f"</arg_key>{line}<arg_value>",
        other_opening=f"</arg_key>{line}<arg_value>",
        end_parameter="</arg_value>",
        end="",
        name_pattern=f"([^\\s<>{{}}\\[\\]\"'`]{{1,256}}){_BLANKS}(?=<arg_key>|{CLOSE})",
        name_begun=f"[^\\s<>{{}}\\[\\]\"'`]{{0,256}}{_BLANKS}(</?{_LETTERS})?",
        key_pattern=f"<arg_key>({_NAME}){_BLANKS}(?:</arg_key>)?{_BLANKS}<arg_value>",
        key_begun=f"<arg_key>[^<>\\n]{{0,256}}{_BLANKS}(</?{_LETTERS}(>{_BLANKS}(<{_LETTERS})?)?)?",
        line=line,
        between=line,
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )


GLM45, GLM47 = _glm("\n"), _glm("")
MINIMAX_M2 = Tags(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    holds_all=True,
    call='<invoke name="',
    call_end='">\n',
    parameter='<parameter name="',
    text_opening='">',
    other_opening='">',
    end_parameter="</parameter>",
    end="</invoke>",
    name_pattern=f'<invoke name="({_QUOTED})">',
    name_begun='<invoke name="[^<>\\n"]{0,256}"?',
    key_pattern=f'<parameter name="({_QUOTED})">',
    key_begun='<parameter name="[^<>\\n"]{0,256}"?',
)
DSML = "｜DSML｜"


def _dsml(word: str) -> Tags:
    """DeepSeek's, with the word for all calls of an answer."""
    return Tags(
        open=f"<{DSML}{word}>",
        close=f"</{DSML}{word}>",
        holds_all=True,
        call=f'<{DSML}invoke name="',
        call_end='">\n',
        parameter=f'<{DSML}parameter name="',
        text_opening='" string="true">',
        other_opening='" string="false">',
        end_parameter=f"</{DSML}parameter>",
        end=f"</{DSML}invoke>",
        name_pattern=f'<{DSML}invoke name="({_QUOTED})">',
        name_begun=f'<{DSML}invoke name="[^<>\\n"]{{0,256}}"?',
        key_pattern=f'<{DSML}parameter name="({_QUOTED})"(?: string="(true|false)")?>',
        key_begun=f'<{DSML}parameter name="[^<>\\n"]{{0,256}}("[ a-z=]{{0,8}}("[a-z]{{0,5}}"?)?)?',
        tokens=(DSML,),
    )


DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")
