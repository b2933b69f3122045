"""The JSON of a body, read strictly: a key that stands twice is refused, because one of the two would be lost.

It knows JSON and bytes. It does not know what bodies mean, or how they come.
"""

from __future__ import annotations

import codecs
import json

from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core.values import unique_keys
from trtrun.errors import InvalidRequestError

_JSON = json.JSONDecoder(object_pairs_hook=unique_keys)


def parse_json(body: bytes) -> object:
    """The JSON value of a body.

    Raises:
        Refusal: it is none, or an object in it has a key twice.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # RFC 8259, 8.1: need not be an error; some editors and shells write it
    if not body.strip():
        raise Refusal(Kind.INVALID, "the body is empty: send a JSON object", code="invalid_json")
    try:
        return _JSON.decode(body.decode())
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not valid UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at').removesuffix(' starting')} at character {error.pos + 1}"
    except InvalidRequestError as error:
        reason = str(error)
    except RecursionError:
        reason = "lists or objects are nested too deeply"
    except ValueError:  # the only other one
        reason = "a number has more digits than any field can have"
    raise Refusal(Kind.INVALID, f"the body is not valid JSON: {reason}", code="invalid_json")
