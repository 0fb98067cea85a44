"""What every head looks at in a text, as maps; tests/test_sample.py has the command that draws them."""

import heads
from data.tokenizer import ByteTokenizer, CharTokenizer
from tests.helpers import BruteForce, assert_close, build


def test_tokens_are_labelled_by_the_tokenizer_of_their_side():
    model = build(kind="encoder_decoder", vocab_size=4, source_vocab_size=257, n_layer=1, n_encoder_layer=1)
    maps = heads.maps_to_draw(model, [*b"cab", 256], [0, 1, 3], CharTokenizer("가나다"), ByteTokenizer())
    texts = {one.kind.split()[0]: (one.queries, one.keys) for one in maps}
    source, target = [*"cab", "<end>"], ["<start>", "가", "나"]
    assert texts == {
        "encoder": (source, source),
        "self-attention": (target, target),
        "cross-attention": (["가", "나", "<end>"], source),
    }


def test_a_long_text_is_drawn_as_far_as_it_is_legible(tmp_path, monkeypatch, capsys):
    """The weights are those of the whole text all the same: an encoder looks at what is not drawn, too."""
    monkeypatch.setattr("heads.MAPPED", 5)
    model, tokenizer = (
        build(kind="encoder_decoder", n_encoder_layer=1, vocab_size=11, seed=3),
        CharTokenizer("abcdefghij"),
    )
    prompt, new = [0, 1, 2, 3, 4, 5, 6, 10], [7, 6, 5, 4, 3, 2, 1]
    maps, reference = heads.maps_to_draw(model, prompt, new, tokenizer, tokenizer), BruteForce(model)
    reference.logits([10, *new[:-1]], prompt)
    assert [one.queries for one in maps if one.kind.startswith("cross")] == [list("hgfed")] * 2
    assert [one.queries for one in maps if one.kind == "self-attention"] == [["<start>", *"hgfe"]] * 2
    for one, (layer, kind) in zip(
        maps, [(0, "encoder"), (0, "self"), (0, "cross"), (1, "self"), (1, "cross")], strict=True
    ):
        assert_close(one.weights, reference.maps[layer, kind][:, :5, :5])
        assert one.keys == (["<start>", *"hgfe"] if kind == "self" else list("abcde"))
    assert heads.labels([10], tokenizer) == ["<end>"]  # an empty source
    heads.draw_attention(tmp_path / "maps.html", maps, "a title")
    assert "shows no more than 5 tokens" in capsys.readouterr().err
