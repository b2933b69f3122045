"""Formats of texts in JSON schemas: those that jsonschema checks by itself, and others that guides follow, for which it
would need more packages, or which it reads as Python does (dates).

By RFC 3339 (dates and times, ISO 8601's durations in its appendix A), RFC 1123 (host names) and RFC 3986 (URIs).
"""

from __future__ import annotations

import re
from datetime import datetime
from urllib.parse import urlsplit

import jsonschema

FORMATS = jsonschema.FormatChecker()
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:[zZ]|[+-]\d\d:\d\d)"
_TIME_PARTS = r"\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S"
_DATE_PARTS = r"\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D"
_DURATION = re.compile(rf"P(?:(?:{_DATE_PARTS})(?:T(?:{_TIME_PARTS}))?|T(?:{_TIME_PARTS})|\d+W)", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?#\[\]]|%[0-9a-fA-F]{2})*")


@FORMATS.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    return not isinstance(value, str) or _is_moment(f"{value}T00:00:00Z")


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or _is_moment(value)


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _is_moment(f"2000-01-01T{value}")


def _is_moment(text: str) -> bool:
    if not re.fullmatch(rf"\d{{4}}-\d\d-\d\d[tT]{_TIME}", text, re.ASCII):
        return False
    # Python reads six digits of a fraction at most, no leap seconds, and no year 0000, which had 366 days as 2000 had.
    read = re.sub(r"\.\d+", "", re.sub("^0000", "2000", text.upper()))
    datetime.fromisoformat(re.sub(r":60(?=[Z+-])", ":59", read))
    return True


@FORMATS.checks("duration")
def _is_duration(value: object) -> bool:
    return not isinstance(value, str) or _DURATION.fullmatch(value) is not None


@FORMATS.checks("hostname")
def _is_hostname(value: object) -> bool:
    return not isinstance(value, str) or all(_LABEL.fullmatch(label) for label in value.split("."))


@FORMATS.checks("uri", raises=ValueError)
def _is_uri(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return _URI.fullmatch(value) is not None and bool(urlsplit(value).scheme)
