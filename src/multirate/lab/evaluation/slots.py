"""Which attributes of a restaurant a text states: the patterns that E2E's slots are found by.

A meaning representation is "name[The Mill], food[French]": slots with a value each. Names are
looked for word by word; the other slots have few values, which people put in few ways. The
patterns are ours, written after the development set's references. [ours]
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

_SLOT = re.compile(r"\s*([A-Za-z ]+?)\s*\[([^\]]*)\]\s*")
NAMES = ("name", "near")
"""Slots whose values are names, which are found as they are."""

_LOW = r"\b(cheap\w*|inexpensive\w*|affordabl\w+|low(er)?[- ]?(ly )?(pric|cost)\w*|budget)\b"
_LOW += r"|\bpric\w*( range)?( is| are| of)?( very| quite)? (low|cheap)"
_MIDDLE = r"\b(moderate\w*|reasonabl\w+|mid[- ]?(dle)?[- ]?(rang|pric)\w*|medium|average[- ]pric\w*"
_MIDDLE += r"|fair(ly)?[- ]pric\w*)\b|\bpric\w*( range)?( is| are| of)?( about)? (average|fair)"
_HIGH = r"\b(expensive|pricey|pricy|costly|upscale|high[- ]?end)\b"
_HIGH += r"|\bhigh(er|ly|ish)?[- ]?(pric|cost)\w*|\bpric\w*( range)?( is| are| of| in)?( the)? high"
_RATED = r"(rat(ed|ing|ings|es?)|review\w*|scor\w+|recommend\w*|feedback|approv\w+|reputation)"


def _rating(words: str, number: str, numeral: str) -> str:
    """A pattern of one customer rating: in words beside "rating", or so many of five."""
    beside = rf"\b({words})\b[^.,;]{{0,20}}\b(customer|{_RATED})"
    after = rf"\b{_RATED}\b[^.,;]{{0,16}}\b({words})\b"
    stars = rf"\b({number}|{numeral})(\.0)?( stars?)?[- ]?(out )?(of|/|-)[- ]?(a )?(possible )?"
    stars += rf"(5|five)\b|\b({number}|{numeral})/5|\b({number}|{numeral})[- ]stars?\b"
    return f"{beside}|{after}|{stars}"


_LOW_RATING = _rating("low|lower|poor|poorly|bad|badly|terrible|worst", "1", "one")
_MIDDLE_RATING = _rating("average|averagely|mediocre|decent|ok|okay|moderate|medium", "3", "three")
_HIGH_RATING = _rating(
    "high|higher|highly|excellent|outstanding|perfect|good|great|well|top|best", "5", "five"
)
_FAMILY = r"(famil(y|ies)|child\w*|kids?\w*)"
_NO_FAMILY = r"\b(not|no|non|nor|never|isn'?t|aren'?t|doesn'?t|don'?t|without|un|lacks?)\b[^.;]"
_NO_FAMILY += rf"{{0,32}}\b{_FAMILY}|{_FAMILY}[- ]?unfriendly|\badults?[- ]?(only|orient\w*|style)"
_NO_FAMILY += rf"|{_FAMILY}[^.;,]{{0,24}}\b(not|unwelcome|prohibited)\b|\bonly (for )?adults?\b"

_VALUES: dict[str, dict[str, str]] = {
    "eatType": {
        "pub": r"\bpubs?\b",
        "restaurant": r"\brestaurants?\b",
        "coffee shop": r"\bcoffee[- ]?(shop|house|place|bar)s?\b|\bcafes?\b",
    },
    "food": {
        "English": r"\b(english|british)\b",
        "French": r"\bfrench\b",
        "Italian": r"\b(italian|pasta|pizza)\b",
        "Japanese": r"\b(japanese|sushi)\b",
        "Indian": r"\bindian\b",
        "Chinese": r"\bchinese\b",
        "Fast food": r"\bfast[- ]?foods?\b",
    },
    "priceRange": {
        "cheap": _LOW,
        "less than £20": rf"\b(less|under|below|lower|cheaper|up to)\b[^.]{{0,12}}20\b|{_LOW}",
        "moderate": _MIDDLE,
        "£20-25": rf"20[^.\d]{{0,8}}25\b|{_MIDDLE}",
        "high": _HIGH,
        "more than £30": rf"\b(more|over|above|upwards?|exceed\w*|least)\b[^.]{{0,12}}30\b|{_HIGH}",
    },
    "customer rating": {
        "low": _LOW_RATING,
        "1 out of 5": _LOW_RATING,
        "average": _MIDDLE_RATING,
        "3 out of 5": _MIDDLE_RATING,
        "high": _HIGH_RATING,
        "5 out of 5": _HIGH_RATING,
    },
    "area": {
        "riverside": r"\b(river\w*|waterfront)\b",
        "city centre": r"\bcit(y|ies)[- ]?cent\w*|\bcent(er|re|ral|rally)\b|\bdowntown\b",
    },
    "familyFriendly": {
        "yes": rf"\b{_FAMILY}",
        "no": _NO_FAMILY,
    },
}
_PATTERNS = {
    slot: {value: re.compile(pattern) for value, pattern in values.items()}
    for slot, values in _VALUES.items()
}


def parse_meaning(text: str) -> dict[str, str]:
    """{"name": "The Mill", …} from "name[The Mill], …". ValueError where it is written otherwise.

    A slot that is there twice keeps its last value.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _SLOT.match(text, at)
        if match is None:
            raise ValueError(f"not a slot[value]: {text[at:][:40]!r}")
        found[match[1]] = match[2]
        at = match.end()
        if at < len(text):
            if text[at] != ",":
                raise ValueError(f"no comma before {text[at:][:40]!r}")
            at += 1
    if not found:
        raise ValueError("no slot")
    return found


def values(slot: str) -> tuple[str, ...] | None:
    """The values that a slot may have; None: any (a name). None at all: it is no slot of E2E."""
    return None if slot in NAMES else tuple(_VALUES.get(slot, ()))


def stated(text: str, meaning: Mapping[str, str]) -> dict[str, set[str]]:
    """{slot: its values that the text states}, for all slots; of names those of `meaning` only.

    Names are taken out before the other slots are looked for: an "All Bar One" has no rating.
    """
    plain = _plain(text)
    found: dict[str, set[str]] = {}
    for slot in NAMES:
        if slot not in meaning:
            continue
        name = _plain(meaning[slot])
        pattern = rf"\b(the )?{re.escape(name.removeprefix('the '))}\b"
        plain, count = re.subn(pattern, " it ", plain)
        found[slot] = {meaning[slot]} if count else set()
    for slot, values in _PATTERNS.items():
        found[slot] = {value for value, pattern in values.items() if pattern.search(plain)}
    if "no" in found["familyFriendly"]:
        found["familyFriendly"] = {"no"}
    return found


def _plain(text: str) -> str:
    """Lower case, without accents, blanks as one space."""
    bare = unicodedata.normalize("NFKD", text.replace("’", "'"))
    bare = "".join(c for c in bare if not unicodedata.combining(c))
    return " ".join(bare.lower().split())
