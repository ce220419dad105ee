"""Chinese: lists of words for phrase mining, simplified characters (OpenCC, t2s), and names: which
words of a text name people, places, organizations or works.

jieba's dictionary calls many words names that are none: 东西 (thing) a place, 道德 (morals)
somebody. Its tag is therefore one feature of several in a linear model of the word:

    is_name("杭州", "ns", known=True)   # True: the sum of the weights of its features is positive
    is_name("东西", "ns", known=True)   # False

`tools/chinese_names` has the labeled words that the weights were learned from, and learns them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from palm_ds.common.errors import UserError

# Never part of a collocation: they combine with everything. jieba tags these as verbs, adjectives
# or nouns; particles, prepositions, pronouns and the like are excluded by their tag.
FUNCTION_WORDS = frozenset(
    """
    是 有 没 没有 无 为 做 作 作为 成 成为 到 去 来 出 入 进 起 起来 出来 下来 上来 出去 下去 上去
    过 过去 过来 进行 给 给予 予以 让 使 使得 令 叫 叫做 称 称为 叫作 说 道 曰 云 谓 言 对曰 回答
    问 问道 答 答道 说道 告诉 认为 以为 觉得 想 看 看到 看见 听 听说 知道 知 请 请问 会 能 能够
    可 可以 可能 要 想要 需要 须 必须 应 应该 应当 当 不得 不能 不会 不可 不要 不必 不是 不如
    愿 愿意 肯 敢 得 得到 所有 具有 带有 属于 等于 位于 在于 如 如下 如此 像 好像 似 似乎 犹 若
    例如 比如 包括 包含 存在 所在 所谓 加以 加 用 使用 利用 拿 把 好 很 太 最 较 更 大 小 多 少
    高 低 长 短 新 老 同 不同 一样 同样 相同 另 其他 其它 各 每 某 本 该 此 其 上 下 中 内 外 前
    后 里 间 时 时候 之时 以来 以后 以前 之后 之前 以上 以下 以内 以外 之间 之中 当中 方面 人 事
    者 年 月 日 时间 情况 东西 地方 一些 一下 一起 一般 之 乎 矣 焉 哉 也 耳 而 其中 目前 现在
    今天 今 列 处
    """.split()  # noqa: SIM905  easier to read than hundreds of quotes
)


@cache
def find_simplifier() -> Callable[[str], str]:
    """OpenCC's converter. It converts word by word and may change the length of a text."""
    try:
        from opencc import OpenCC
    except ImportError:
        raise UserError("simplify: needs the package opencc: pip install opencc") from None
    return OpenCC("t2s").convert


def simplify_in_place(text: str) -> str:
    """Simplifies without changing the length, so that character offsets stay valid.

    >>> simplify_in_place("漢字 and 頭髮")
    '汉字 and 头发'
    """
    simplify = find_simplifier()
    simplified = simplify(text)
    if len(simplified) == len(text):
        return simplified
    return "".join(new if len(new := simplify(old)) == 1 else old for old in text)


TAGS = frozenset({"nr", "ns", "nt", "nz", "nrfg", "nrt"})
"""jieba's parts of speech for names of persons, places, organizations, and others."""
WEIGHTS = Path(__file__).with_name("chinese_name_weights.txt")
_MAX_WORD_LENGTH = 6  # longer words are of one kind


def features(word: str, tag: str, *, known: bool) -> list[str]:
    """The features of a word of two or more characters: the word, its characters by place, and its
    tag with its length. `known`: whether it is in jieba's dictionary; others are guesses."""
    length = min(len(word), _MAX_WORD_LENGTH)
    return [
        f"{tag} {length} {'known' if known else 'new'}",
        f"word {word}",
        f"first {word[0]}",
        f"first two {word[:2]}",
        f"last {word[-1]}",
        f"last two {word[-2:]}",
        *(f"inside {character}" for character in sorted(set(word[1:-1]))),
    ]


def is_name(word: str, tag: str, *, known: bool) -> bool:
    """Whether a Chinese word is a name; at least two characters, one of TAGS."""
    if len(word) < 2 or tag not in TAGS:
        return False
    weights = _weights()
    return sum(weights.get(feature, 0) for feature in features(word, tag, known=known)) > 0


@cache
def _weights() -> dict[str, int]:
    """{feature: its weight in hundredths}; the threshold is part of the weights of the tags."""
    lines = WEIGHTS.read_text("utf-8").split("\n")
    rows = (line.rpartition("\t") for line in lines if line and not line.startswith("#"))
    return {feature: int(weight) for feature, _, weight in rows}
