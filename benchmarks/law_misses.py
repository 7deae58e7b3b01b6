"""Why the laws of some models of the catalogue are fewer, or more, than a count at one point says."""

from __future__ import annotations

KINKS = (
    "the count is of one point, where some neurons are always or never active; over random parameters there are no "
    "more laws of degree one and two than are listed"
)

UNCLEAR = (
    "the count has no clear gap between directions and rounding; the listed laws hold, and over random parameters "
    "there are as many of degree one and two"
)

MEAN = (
    "one law, (the channel sum of the embeddings)² − (that of the first block's readers)²: the first norm "
    "does not see the mean of what the first block reads, so that mean can be scaled alone. A scaling "
    "along the vector of ones, not along an axis"
)

REASONS: dict[str, str] = {
    "OPT, norm last": MEAN,
    "PointNet": (
        "three of GL(2): a learned 2×2 transform to which the identity is added, T + 1, moves as (T + 1)g − "
        "1: its bias is moved by a constant of the program; only single numbers that are added to a parameter "
        "are followed so"
    ),
    "RWKV": (
        "a scale for each row of the table of words, which only a norm reads: the rows of a table move by one scale "
        "here"
    ),
    "ViT classifier": (
        "the length of all patches and their positions, which nothing reads after the attention of the only "
        "layer: a fact of this depth"
    ),
    "bottleneck-transformer-pytorch": (
        "the sum of each of two tables of positions that are added up inside a product: after it only the "
        "axes are known along which a shift varies, not its parts; 2 more at the counted point alone"
    ),
    "glom-pytorch": (
        "two shifts of one bias against another, lost where contributions are stacked and summed, and the mixing of "
        "the two channels of the first level, of which the scalings are found: joined levels keep scalings only"
    ),
    "halonet-pytorch": (
        "rows of the tables of relative positions that no pair of places reads, and shifts of the other rows: "
        "rows of scores are padded, re-cut and partly thrown away, and what is thrown away is not followed "
        "back into the product"
    ),
    "iTransformer": ("the length of a memory token, which nothing reads after the only layer: a fact of this depth"),
    "performer-pytorch": (
        "with heads of width 2 there is one random feature, which cancels in the quotient, so that queries "
        "have no effect: a fact of this size"
    ),
    "rtdl ResNet": (
        "(b − μ)² for the running means μ of batch norms in use: biases are moved by constants that are not "
        "the same for all channels; the other 5 are neurons that do not switch at the counted point"
    ),
    "taylor-series-linear-attention": (
        "a matrix on x and its square on x ⊗ x, laid side by side: only scalings are followed through "
        "products of entries"
    ),
    "torch encoder, post-norm": MEAN,
    "torch encoder, pre-norm": (
        "one law, (the channel sum of all that writes to the stream)² − (that of the head's rows)²: norms do "
        "not see the stream's mean, the head does, so that mean can be scaled alone. A scaling along the "
        "vector of ones, not along an axis; the other 8 are neurons that do not switch at the counted point"
    ),
    "torch-geometric TransformerConv": (
        "four key biases, and four value biases against those of the skip: a softmax over neighbours in scatter "
        "operations (maximum, exponential, sum, quotient), each of which sees the shift"
    ),
    "x-transformers, T5 bias, scale norm": (
        "56 numbers of buckets that sequences of four tokens do not reach: longer ones would"
    ),
    "x-transformers, gated values, post-norm": MEAN,
    "x-transformers, talking heads, memory keys": (
        "x + T x: scaling a head's scores moves 1 + T, and the 1 is no parameter"
    ),
}
"""By the name of the model: what the missing laws are, and which rule does not see them."""
