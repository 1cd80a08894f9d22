"""A classifier that needs no model and no training: it counts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.workload import WorkloadClassifier

HEAD_CHARS, TAIL_CHARS = 3000, 1500
"""What is looked at of a long prompt: its question stands at one of its ends."""
FENCE = re.compile(r"^[ >]*(```|~~~)", re.MULTILINE)
CODE_LINE = re.compile(
    r"""^\s*(?:
      (?:def|class|import|from|return|async|await|elif|except|raise|yield|assert)\b.*[:(\w\)]$ |
      (?:public|private|static|const|let|var|func|fn|impl|struct|enum|package|using|namespace|template)\b.+ |
      \#include\b.* | \#!/.* | @\w+(?:\(.*\))?$ | </?\w+[^<>]*>$ | SELECT\b.* |
      [\w.\[\]]+\s*(?:[-+*/|&]?=|:=|<-)\s*\S.* |
      (?:for|while|if|switch|with|try|else)\b.*[:{]$ | self\.\w+.* | [\w.]+\(.*\)[;:]?$ |
      .*[;{}\\]$ | [\])}]+,?$ | >>>\s.* | \$\s\w+.*
    )\s*$""",
    re.VERBOSE,
)
OPENS_BLOCK = re.compile(r"^\s*(?:async\s+def|def|class|func|fn|public|private|static)\b.*[:{(,]$")
ASKS_FOR_CODE = re.compile(
    r"\b(?:write|implement|fix|debug|refactor|complete|review|translate)\b[^.?!\n]{0,60}"
    r"\b(?:function|program|script|class|method|code|regex|query|unit tests?|bug)\b",
    re.IGNORECASE,
)
FORMULA = re.compile(
    r"\\(?:frac|sum|int|sqrt|cdot|times|le|ge|infty|alpha|beta|theta|pi|mathbb|begin\{)|\$[^$\n]{1,80}\$|"
    r"(?<![\w.])-?\d[\d.,]*\s*[-+*/^=<>\u00d7\u00f7]\s*-?[\d(]|\b[a-z]\s?(?:\^|\*\*)\s?\d|"
    r"\b[a-z]\([a-z](?:, ?[a-z])*\)\s*=|\b\d*[a-z]\s*[-+=]\s*\d"
)
ASKS_FOR_MATHS = re.compile(
    r"\b(?:solve|evaluate|simplify|integrate|differentiate|prove|factor(?:ise|ize)?|calculate|compute)\b|"
    r"\bhow (?:many|much|old|far|long)\b|"
    r"\b(?:equation|integral|derivative|polynomial|theorem|lemma|matrix|eigenvalues?|probability|modulo|"
    r"coefficients?|hypergeometric|triangle|prime numbers?|percent(?:age)?|perimeter)\b",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?![\w])")


class Rules(WorkloadClassifier):
    """Code, maths, long documents and chat, told apart by countable signs.

    In this order. ``code``: at least ``code_share`` of the lines (blank ones apart) are code, or a short prompt asks
    for a program. ``maths``: formulas, numbers and words of the subject, at least ``maths_density`` a hundred words.
    ``document``: at least ``document_words`` words. ``chat``: everything else. Of a long prompt its first 3000 and last
    1500 characters are read.
    """

    class Config(ComponentConfig):
        """names: what a class is called in the library, for example {"document": "prose"}."""

        code_share: float = Field(0.5, gt=0, le=1)
        maths_density: float = Field(4.0, gt=0)
        document_words: int = Field(350, ge=1)
        names: Mapping[str, str] = Field(default_factory=dict)

    config: Config

    def classify(self, prompt: str) -> str:
        """One of ``code``, ``maths``, ``document`` and ``chat``, or what ``names`` calls it."""
        found = self._class(prompt)
        return self.config.names.get(found, found)

    def _class(self, prompt: str) -> str:
        text = prompt if len(prompt) <= HEAD_CHARS + TAIL_CHARS else prompt[:HEAD_CHARS] + prompt[-TAIL_CHARS:]
        words = len(prompt.split())
        long = words >= self.config.document_words
        if code_share(text) >= self.config.code_share or (not long and ASKS_FOR_CODE.search(text)):
            return "code"
        if maths_density(text) >= self.config.maths_density:
            return "maths"
        return "document" if long else "chat"


def code_share(text: str) -> float:
    """The share of lines, blank ones apart, that look like code, stand between fences or are indented below code."""
    lines, code, fenced, below = 0, 0, False, False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        elif line.strip():
            looks, indented = CODE_LINE.match(line) is not None, line.startswith((" ", "\t"))
            below = (below or OPENS_BLOCK.match(line) is not None) if indented else looks
            lines += 1
            code += fenced or looks or (indented and below)
    return code / max(lines, 1)


def maths_density(text: str) -> float:
    """Signs of mathematics in a hundred words. Numbers count where something is asked of them."""
    words = max(len(text.split()), 1)
    asked = len(ASKS_FOR_MATHS.findall(text))
    numbers = min(len(NUMBER.findall(text)), 2 * asked)
    return 100 * (len(FORMULA.findall(text)) + asked + numbers) / words
