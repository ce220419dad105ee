"""Chinese word lists for phrase mining."""

from __future__ import annotations

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
