"""BERT: LayerNorm behind each branch, so that every sum is read by one norm and then starts anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.kind import OneScale, Translation
from conserved.laws import Dropped
from conserved.recognize.activation import degree
from conserved.recognize.embeddings import class_shift, shift_between
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, query_key, value_output
from conserved.recognize.hf.parts import inert_padding, named, softmax_attention, token_table
from conserved.recognize.norms import Writer, centre, gain, norm_at
from conserved.recognize.registry import Component, register, require, stranger_above
from conserved.recognize.residual import post_norm_sum
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View

_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


def _heads(layer: Site) -> Iterator[Symmetry]:
    attention = layer.child("attention")
    require(attention, named("bert", "BertAttention"))
    inner = softmax_attention(require(attention.child("self"), named("bert", "BertSelfAttention")))
    module: Any = inner.module
    heads, width = module.num_attention_heads, module.attention_head_size
    queries, keys, values = (Heads.row(inner.linear(name), heads, width) for name in ("query", "key", "value"))
    yield from query_key(attention, queries, keys)
    dense = require(attention.child("output"), named("bert", "BertSelfOutput")).linear("dense")
    yield from value_output(attention, values, Heads.row(dense, heads, width, side="inputs"))


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    if site.optional("crossattention") is not None:
        raise Unreadable(f"{site.path} attends to another sequence, which is not described here")
    yield from _heads(site)
    module: Any = site.module
    up, down = site.linear("intermediate.dense"), site.linear("output.dense")
    for part in ("intermediate", "output"):
        require(site.child(part), named("bert", f"Bert{part.capitalize()}"))
    yield from neurons(site, up.outputs(), down.inputs(), module.intermediate.intermediate_act_fn)
    first, second = (norm_at(site.child(name)) for name in ("attention.output.LayerNorm", "output.LayerNorm"))
    yield from post_norm_sum(site, [], [], _attention_writer(site), first)
    writer = Writer.made_by(down.outputs(), dropout=module.output.dropout.p)
    start = first.gain() + first.bias()
    yield from post_norm_sum(site, start, up.inputs(), writer, second, part="feedforward")


def _attention_writer(layer: Site) -> Writer:
    module: Any = layer.module
    return Writer.made_by(layer.linear("attention.output.dense").outputs(), dropout=module.attention.output.dropout.p)


def _attention_readers(layer: Site) -> list[View]:
    return [v for name in ("query", "key", "value") for v in layer.linear(f"attention.self.{name}").inputs()]


def _embeddings(site: Site) -> Iterator[Symmetry | Dropped]:
    tokens = site.child(_TABLES[0])
    yield from inert_padding(tokens)
    tables = [token_table(site.child(name)) for name in _TABLES]
    for name in _TABLES[1:]:
        yield from shift_between(tokens, site.child(name))
    norm = norm_at(site.child("LayerNorm"))
    if norm.centres:
        yield from centre(site, tables)
    views = [view for table in tables for view in table.views]
    stranger = stranger_above(site)
    if stranger:
        yield Dropped(site.join("sum_scale"), stranger)
    else:
        yield site.symmetry("sum_scale", OneScale(), plus=views, minus=[], epsilon=norm.epsilon)


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    """The first sum of each layer starts with what the layer before, or the embeddings, end with."""
    try:
        require(site.child("embeddings"), named("bert", "BertEmbeddings"))
        require(site.child("encoder"), named("bert", "BertEncoder"))
        layers = [require(layer, named("bert", "BertLayer")) for layer in site.children("encoder.layer")]
        before = norm_at(site.child("embeddings.LayerNorm"))
        for layer in layers:
            if layer.optional("crossattention") is not None:
                raise Unreadable(f"{layer.path} attends to another sequence, which is not described here")
            norm = norm_at(layer.child("attention.output.LayerNorm"))
            start, readers, writer = before.gain() + before.bias(), _attention_readers(layer), _attention_writer(layer)
            for item in post_norm_sum(layer, start, readers, writer, norm, part="attention"):
                if isinstance(item, Symmetry) and item.family == "sum_scale":
                    yield item
            before = norm_at(layer.child("output.LayerNorm"))
    except Unreadable as problem:
        yield Dropped(site.join("sums"), str(problem))


def _last_norm(site: Site) -> Site:
    layers = list(require(site.child("bert"), named("bert", "BertModel")).children("encoder.layer"))
    return layers[-1].child("output.LayerNorm") if layers else site.child("bert.embeddings.LayerNorm")


def _masked(site: Site) -> Iterator[Symmetry | Dropped]:
    """A transform with a norm of its own in front of a decoder that is usually tied to the word embeddings."""
    predictions = require(site.child("cls.predictions"), named("bert", "BertLMPredictionHead"))
    transform = require(predictions.child("transform"), named("bert", "BertPredictionHeadTransform"))
    yield from gain(_last_norm(site), [transform.child("dense")])
    module: Any = transform.module
    norm = norm_at(transform.child("LayerNorm"))
    if degree(module.transform_act_fn) is not None:
        outputs = transform.linear("dense").outputs()
        yield transform.symmetry("sum_scale", OneScale(), plus=outputs, minus=[], epsilon=norm.epsilon)
    decoder = predictions.child("decoder")
    yield from gain(norm.site, [decoder])
    if site.is_whole_model:
        yield from class_shift(decoder, predictions.linear("decoder").outputs())
    yield from _second_name_of_the_bias(site, predictions)


def _second_name_of_the_bias(site: Site, predictions: Site) -> Iterator[Symmetry]:
    """`predictions.bias` is a second name of the decoder's bias; where it is not, nothing reads it."""
    if not predictions.has("bias"):
        return
    if predictions.module._parameters["bias"] is predictions.child("decoder").module._parameters.get("bias"):
        if site.is_whole_model:
            yield from class_shift(predictions, [predictions.view("bias", axes=0)])
        return
    row = predictions.view("bias", grid=(1, predictions.view("bias").n))
    yield predictions.symmetry("unused", Translation(), plus=[row], minus=[], part="bias")


def _pooled(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from gain(_last_norm(site), [site.child("bert.pooler.dense")])
    if site.is_whole_model:
        yield from class_shift(site.child("classifier"), site.linear("classifier").outputs())


def _tokens(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from gain(_last_norm(site), [site.child("classifier")])
    if site.is_whole_model:
        yield from class_shift(site.child("classifier"), site.linear("classifier").outputs())


for _name in (
    "BertSelfAttention",
    "BertAttention",
    "BertSelfOutput",
    "BertIntermediate",
    "BertOutput",
    "BertPooler",
    "BertOnlyMLMHead",
    "BertLMPredictionHead",
    "BertPredictionHeadTransform",
):
    register(Component(type=named("bert", _name), part=True))
register(Component(type=named("bert", "BertEmbeddings"), laws=_embeddings))
register(Component(type=named("bert", "BertLayer"), laws=_layer))
register(Component(type=named("bert", "BertEncoder")))
register(Component(type=named("bert", "BertModel"), laws=_model))
register(Component(type=named("bert", "BertForMaskedLM"), laws=_masked))
register(Component(type=named("bert", "BertLMHeadModel"), laws=_masked))
register(Component(type=named("bert", "BertForSequenceClassification"), laws=_pooled))
register(Component(type=named("bert", "BertForTokenClassification"), laws=_tokens))
