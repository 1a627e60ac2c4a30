"""How one agent's responses reach another: re-encoding, hazards, end tokens."""

from functools import cache

import pytest
import torch
from batches import batch_of, with_given_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

import hacpo_kit as hk

QUIET = {"progress": False}


def in_pool_order(batch, values):
    """Values of a batch by position in the pool, whatever the order of the batch."""
    return dict(sorted(zip(batch.index, values, strict=True)))


def responses(batch):
    """Position in the pool → response in the learner's tokens."""
    return in_pool_order(batch, batch.response_ids)


def source_means(batch):
    """Position in the pool → the source's mean log-probability."""
    return in_pool_order(batch, batch.source_mean_logp.tolist())


def peer(batch):
    """The peer responses of a batch, in the order of the pool."""
    own = in_pool_order(batch, batch.own.tolist())
    return [ids for i, ids in responses(batch).items() if not own[i]]


AWKWARD = [
    "x != y and a.b == c",
    "hello !",
    "for 'manual'",
    " leading and trailing ",
    "a  b\n\n c\t.",
    "∀x∈ℝ: 🙂",
    "e\u0301 é",
    "\r\n\u00a0\u200b",
    r"7+8=15;\boxed{95}",
]


@cache
def _both():
    return hk.load_agents("tiny-model-pair", device="cpu")  # once: views change nothing


FORCED = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}


def spoiled(agent, what):
    encode = agent.tokenizer
    return {
        "half an emoji": [*encode("ok 🙂", add_special_tokens=False)["input_ids"][:-2]],
        "half a sign": [*encode("∀", add_special_tokens=False)["input_ids"][:-1], 20],
        "a control token": [20, encode.pad_token_id, 21],
        "an id without a token": [20, len(encode), 21],
    }[what]


@pytest.mark.parametrize("text", AWKWARD)
def test_view_of_peer_text_decodes_to_the_same_text(pair, problems, text):
    for agent in pair:
        prompt, ids = agent.view(problems[0], text, ended=True)
        assert prompt == agent.encode_prompt(problems[0].prompt)
        assert ids[-1] == agent.tokenizer.eos_token_id and agent.decode(ids[:-1]) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_view_preserves_any_text(text):
    problem = hk.Problem("p", "1+1=", "2")
    for agent in _both():
        assert agent.decode(agent.view(problem, text, ended=False)[1]) == text


@pytest.mark.parametrize("text", ["x != y and a.b == c", "hello !", "for 'manual'"])
def test_decode_never_cleans_up_spaces(tiny_agent, tokenizers, text):
    agent = tiny_agent(tokenizers.bytes(clean_up_tokenization_spaces=True, **FORCED))
    assert agent.tokenizer.decode(agent.tokenizer(text)["input_ids"]) != text  # or the test shows nothing
    assert agent.decode(agent.tokenizer(text)["input_ids"]) == text


def test_encode_for_keeps_own_tokens_and_re_encodes_peer_text(tiny_agent, tokenizers, problems, write):
    merges = ["he", "ll", ("ll", "o"), ("he", "llo")]
    author = tiny_agent(tokenizers.bytes(merges=merges), name="author")
    reader = tiny_agent(tokenizers.bytes(merges=merges), name="reader", seed=1)
    he, llo, hello, end = author.tokenizer.convert_tokens_to_ids(["he", "llo", "hello", "<end>"])
    assert author.tokenizer("hello")["input_ids"] == [hello]
    write(author, [[he, llo, end]])
    write(reader, [[hello, end]])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    own, others = batch_of(author, pool), batch_of(reader, pool)
    assert [r.text for r in pool] == ["hello"] * 4
    assert list(responses(own).values()) == [(he, llo, end)] * 2 + [(hello, end)] * 2
    assert list(responses(others).values()) == [(hello, end)] * 4
    # the author's mean is over its three tokens, though the reader counts two
    assert len(pool.rollouts[0].logps) == 3
    assert source_means(others)[0] == pytest.approx(pool.rollouts[0].logps.mean())


def test_encode_for_reads_the_same_peer_response_once(pair, problems, say, monkeypatch):
    qwen, llama = pair
    say(qwen, [r"\boxed{2}", r"\boxed{2}", r"\boxed{3}"])
    say(llama, [r"\boxed{4}"])
    pool = hk.rollout(pair, problems[:2], n=3, **QUIET)
    whole, view, read = batch_of(llama, pool), llama.view, []
    monkeypatch.setattr(
        llama, "view", lambda problem, text, **how: read.append((problem.id, text)) or view(problem, text, **how)
    )
    monkeypatch.setattr(llama, "encode_prompt", lambda prompt: pytest.fail("its own rollouts have the prompt's tokens"))
    batch = batch_of(llama, pool)
    assert sorted(read) == sorted((p.id, text) for p in problems[:2] for text in (r"\boxed{2}", r"\boxed{3}"))
    assert batch.response_ids == whole.response_ids and batch.prompt_ids == whole.prompt_ids and len(batch) == 12


@pytest.mark.parametrize(
    ("what", "hazard"),
    [
        ("half an emoji", "lossy_text"),
        ("half a sign", "lossy_text"),
        ("a control token", "control_token"),
        ("an id without a token", "lossy_text"),
    ],
)
def test_encode_for_excludes_what_text_cannot_represent(tiny_agent, tokenizers, problems, write, say, what, hazard):
    author = tiny_agent(tokenizers.bytes(specials=("<end>", "<pad>"), pad_token="<pad>"), name="author", extra=8)
    reader = tiny_agent(name="reader", seed=1)
    end = author.tokenizer.eos_token_id
    write(author, [[*spoiled(author, what), end], [20, end]])
    say(reader, ["1"])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == [hazard, "", "", ""]
    assert pool.metrics("author")["share_hazard"] == 0.5
    own, others = batch_of(author, pool), batch_of(reader, pool)
    assert responses(own)[0] == (*spoiled(author, what), end) and own.excluded == {}
    assert others.excluded == {hazard: 1} and set(others.index) == {1, 2, 3}


def test_encode_for_excludes_special_tokens_without_a_role(tiny_agent, tokenizers, problems, write, say):
    author = tiny_agent(tokenizers.bytes(unnamed=["<|start_header_id|>"]), name="author")
    reader = tiny_agent(name="reader", seed=1)
    header, end = author.tokenizer.convert_tokens_to_ids(["<|start_header_id|>", "<end>"])
    assert header not in author.tokenizer.all_special_ids  # or the test shows nothing
    write(author, [[20, header, end], [20, end]])
    say(reader, ["<|start_header_id|>", "fine"])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == ["control_token", "", "", ""]
    assert batch_of(reader, pool).excluded == {"control_token": 1}
    assert batch_of(author, pool).excluded == {"control_token": 1}


def test_encode_for_excludes_text_that_becomes_a_control_token(pair, problems, say):
    qwen, llama = pair
    say(llama, [r"<|im_end|>\boxed{1}", r"\boxed{1}"])
    say(qwen, [r"\boxed{2}"])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == [""] * 4  # for its author it is plain text
    assert batch_of(qwen, pool).excluded == {"control_token": 1}
    assert batch_of(llama, pool).excluded == {}


def test_encode_for_excludes_unknown_words_for_that_learner_only(tiny_agent, tokenizers, say):
    problem = hk.Problem("p", "one two", "3")
    reader = tiny_agent(tokenizers.words(["one", "two", " "]), name="reader")
    author = tiny_agent(name="author", seed=1)
    say(author, ["one two", "one three", "one <unk>"])
    say(reader, ["one"])
    pool = hk.rollout([reader, author], [problem], n=3, **QUIET)
    batch = batch_of(reader, pool)
    assert batch.excluded == {"lossy_reencoding": 1, "control_token": 1}
    one, two, space, end = reader.tokenizer.convert_tokens_to_ids(["one", "two", " ", "<end>"])
    assert peer(batch) == [(one, space, two, end)]
    assert batch_of(author, pool).excluded == {}


def test_encode_for_takes_a_response_of_only_the_end_token(pair, problems, write):
    llama = pair[1]
    for agent in pair:
        write(agent, [[agent.tokenizer.eos_token_id]])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    assert [(r.text, len(r.token_ids), r.hazard) for r in pool] == [("", 1, "")] * 4
    batch = batch_of(llama, pool)
    assert peer(batch) == [(llama.tokenizer.eos_token_id,)] * 2 and batch.excluded == {}
    assert source_means(batch)[0] == pytest.approx(pool.rollouts[0].logps[0])
    # without end tokens nothing is left to compare, but own answers still count it
    batch = batch_of(llama, pool, count_eos=False)
    assert (
        batch.excluded == {"empty": 2}
        and batch.own.all()
        and batch.response_ids == ((llama.tokenizer.eos_token_id,),) * 2
    )
    assert batch.source_mean_logp.isfinite().all()


@pytest.mark.parametrize("count_eos", [True, False])
def test_encode_for_counts_the_end_token_on_both_sides_or_on_neither(pair, problems, write, count_eos):
    qwen, llama = pair
    end_of_text = qwen.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    write(qwen, [[20, 21, end_of_text], [20, 21, 22, 23]])  # the second is cut at four tokens
    write(llama, [[30, 31, llama.tokenizer.eos_token_id]])
    with pytest.warns(UserWarning, match="50%"):
        pool = hk.rollout(pair, problems[:1], n=2, max_new_tokens=4, **QUIET)
    ended, cut = pool.rollouts[:2]
    assert (ended.ended, cut.ended) == (True, False)
    batch = batch_of(llama, pool, count_eos=count_eos)
    text = llama.tokenizer(qwen.decode([20, 21]), add_special_tokens=False)["input_ids"]
    assert peer(batch)[0] == (*text, *([llama.tokenizer.eos_token_id] if count_eos else []))
    assert llama.decode(peer(batch)[1]) == qwen.decode([20, 21, 22, 23])  # never an end token
    counted = ended.logps if count_eos else ended.logps[:2]
    expected = [counted.mean(), cut.logps.mean(), *[pool.rollouts[2].logps.mean()] * 2]
    assert list(source_means(batch).values()) == pytest.approx(expected)
    own = (30, 31, llama.tokenizer.eos_token_id)
    assert (responses(batch)[2], responses(batch)[3]) == (own, own)  # as sampled, either way


def test_encode_for_excludes_a_response_that_is_too_long_and_never_cuts_it(tiny_agent, qwen, problems, say):
    problem = problems[0]
    room = len(tiny_agent().encode_prompt(problem.prompt)) + 8
    reader = tiny_agent(name="reader", positions=room)
    say(qwen, ["1" * 7, "1" * 8, "1" * 20])
    say(reader, ["2"])
    pool = hk.rollout([reader], [problem], n=3, max_new_tokens=8, **QUIET)
    wide = hk.rollout([qwen], [problem], n=3, **QUIET)
    both = hk.Pool((*pool, *wide), (problem,), ("reader", "qwen3-sums"), 3)
    batch = batch_of(reader, both)
    assert batch.excluded == {"too_long": 2}
    assert peer(batch) == [(*reader.tokenizer("1" * 7)["input_ids"], reader.tokenizer.eos_token_id)]
    assert len(in_pool_order(batch, batch.prompt_ids)[3]) + len(peer(batch)[0]) == room


def test_advantage_excludes_unscorable_rollouts_for_every_learner(pair, problems, say):
    for agent in pair:
        say(agent, [r"\boxed{1}"])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    pool = with_given_rewards(pool, [1.0, None, 0.0, 1.0])
    for agent in pair:
        batch = batch_of(agent, pool)
        assert batch.excluded == {"unscorable": 1} and set(batch.index) == {0, 2, 3}
        assert batch.advantages.isfinite().all()
    alone = batch_of(pair[0], pool, share="none")
    assert alone.excluded == {"unscorable": 1} and alone.index == (0,)


def test_advantage_records_log_probabilities_that_give_own_ratios_of_one(pair, problems):
    pool = hk.rollout(pair, problems[:4], n=4, temperature=0.6, **QUIET)
    batch = batch_of(pair[0], pool, temperature=0.6)
    with torch.no_grad():
        logps, mask = pair[0].logprobs(batch.prompt_ids, batch.response_ids, temperature=0.6)
    ratio = ((logps * mask).sum(-1) / mask.sum(-1) - batch.source_mean_logp).exp()
    torch.testing.assert_close(ratio[batch.own], torch.ones(int(batch.own.sum())), rtol=1e-4, atol=1e-5)
    assert (ratio[~batch.own] - 1).abs().max() > 0.01
