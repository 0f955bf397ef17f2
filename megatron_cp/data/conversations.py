"""Parser of a line of a `.jsonl` file, as text to learn and text that is only read.

    {"text": ...}                                       all is learnt
    {"prompt": ..., "answer": ...} or "completion"      the answer is learnt
    {"messages": [{"role": ..., "content": ...}, ...]}  what the assistant says is learnt

Messages become plain text: for each message `<|role|>`, a new line, the content, a new line. The end of the assistant's
turn is learnt too, and so is the end of a document whose last part is.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ROLES = ("system", "developer", "user", "assistant", "tool")
ALLOWED = 'a JSON object in every line, with a string "text", "prompt" and "answer", or "messages"'


class Passage(NamedTuple):
    """A passage of a document.

    Attributes:
        text: its UTF-8 bytes; half a character, which JSON can spell, becomes bytes that are not UTF-8.
        is_learnt: True if its tokens are to be predicted.
    """

    text: bytes
    is_learnt: bool = True


def parse_line(line: bytes) -> list[Passage]:
    """Returns the document of a line.

    Raises:
        ValueError: why the line is none.
    """
    try:
        entry = json.loads(line.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:  # not UTF-8 or not JSON
        raise ValueError(getattr(error, "msg", str(error))) from None
    entry = entry if isinstance(entry, dict) else {}
    answers = [key for key in ("answer", "completion") if "prompt" in entry and key in entry]
    found = [key for key in ("text", "messages") if key in entry] + answers
    if not found:
        raise ValueError('no object with "text", with "prompt" and "answer", or with "messages"')
    if len(found) > 1:
        raise ValueError(f'both "{found[0]}" and "{found[1]}"')
    if found == ["messages"]:
        return _turns(entry["messages"])
    if found == ["text"]:
        return [Passage(_encoded(entry, "text"))]
    return [Passage(_encoded(entry, "prompt"), False), Passage(_encoded(entry, answers[0]))]


def _turns(messages: Any) -> list[Passage]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" is no list of messages')
    parts = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}, not one of {', '.join(ROLES)}")
        try:
            content = _encoded(message, "content")
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
        parts += [Passage(f"<|{role}|>\n".encode(), False), Passage(content + b"\n", role == "assistant")]
    if not any(part.is_learnt for part in parts):
        raise ValueError("no message of the assistant, so nothing to learn")
    return parts


def _encoded(entry: dict[str, Any], key: str) -> bytes:
    text = entry.get(key)
    if not isinstance(text, str):
        raise ValueError(f'"{key}" is no string')
    return text.encode(errors="surrogatepass")
