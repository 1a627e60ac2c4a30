"""The objective against golden values, finite differences and properties."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kit import objective
from hacpo_kit.config import Config
from hacpo_kit.objective import clip_band, grpo_loss, hacpo_loss, kl_to_reference, sequence_ratio, token_logprobs

GOLDEN = Path(__file__).parent / "golden"
OBJECTIVE = json.loads((GOLDEN / "objective.json").read_text())["cases"]
GRPO = json.loads((GOLDEN / "grpo.json").read_text())["cases"]


def t(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def padded(rows, fill=float("nan"), left=False):
    width = max(map(len, rows)) + 2
    values, mask = (
        torch.full((len(rows), width), fill, dtype=torch.float64),
        torch.zeros(len(rows), width, dtype=torch.bool),
    )
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(len(row))
        values[i, where], mask[i, where] = t(row), True
    return values, mask


def loss(rows, source, advantages, weights, own, m=0, config=None, **kwargs):
    """Loss and the gradient with respect to the (padded) token log-probs."""
    logp, mask = padded(rows, **kwargs)
    logp.requires_grad_()
    out = hacpo_loss(logp, mask, t(source), t(advantages), t(weights), torch.tensor(own), m, config or Config())
    out.loss.backward()
    return out, logp.grad, mask


def close(actual, expected):
    torch.testing.assert_close(actual, t(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("case", OBJECTIVE, ids=lambda c: c["name"])
def test_hacpo_loss_golden(case, left):
    i, e = case["inputs"], case["expect"]
    config = Config(alpha=i["alpha"], delta=i["delta"], delta_step=i["step"], eps_low=i["el"], eps_high=i["eh"])
    out, grad, mask = loss(i["logp"], i["src"], i["A"], i["w"], i["own"], i["m"], config, left=left)
    close(out.ratio, e["ratio"])
    close(out.objective.detach(), e["objective"])
    close(out.loss.detach(), e["loss"])
    close(grad, padded(e["grad"], fill=0.0, left=left)[0].tolist())
    assert (grad[~mask] == 0).all()  # the padding is NaN
    assert clip_band(i["m"], i["delta"], i["step"])[0] == pytest.approx(e["lower"], rel=1e-12)


@pytest.mark.parametrize("case", GRPO, ids=range(len(GRPO)))
def test_grpo_loss_golden(case):
    i, e = case["inputs"], case["expect"]
    logp, mask = padded(i["logp"])
    logp.requires_grad_()
    config = Config.preset("grpo", eps_low=i["eps_low"], eps_high=i["eps_high"])
    out = grpo_loss(logp, padded(i["old_logp"])[0], mask, t(i["A"]), config)
    out.loss.backward()
    close(out.objective.detach(), e["objective"])
    close(out.loss.detach(), e["loss"])
    close(logp.grad, padded(e["grad"], fill=0.0)[0].tolist())


def test_hacpo_loss_gradient_is_that_of_finite_differences():
    """With the weight sg[c]^α held fixed, since a stopped gradient is no derivative of the value."""
    case = next(c for c in OBJECTIVE if c["name"] == "m=2 alpha=1.0")["inputs"]
    config = Config(alpha=1.0, eps_low=case["el"], eps_high=case["eh"])
    args = (case["src"], case["A"], case["w"], case["own"], case["m"], config)
    _, grad, _ = loss(case["logp"], *args)
    stopped = loss(case["logp"], *args)[0].ratio.detach().clamp(clip_band(2, config.delta, config.delta_step)[0], 1.0)
    for row, column in [(i, len(r) - 1) for i, r in enumerate(case["logp"])]:
        values = []
        for h in (1e-6, -1e-6):
            rows = [list(r) for r in case["logp"]]
            rows[row][column] += h
            out = loss(rows, *args)[0]
            lower = clip_band(2, config.delta, config.delta_step)[0]
            own = torch.tensor(case["own"])
            value = torch.where(
                own,
                out.objective.detach(),
                out.ratio.detach().clamp(lower, 1.0) * stopped * t(case["w"]) * t(case["A"]),
            )
            values.append(-value.mean().item())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(grad[row, column].item(), abs=1e-8)


def test_hacpo_loss_counts_the_peer_ratio_once_in_the_gradient():
    out, grad, _ = loss([[0.0]], [-torch.log(t(0.9)).item()], [1.0], [1.0], [False])
    assert out.objective.item() == pytest.approx(0.81)
    assert -grad[0, 0].item() == pytest.approx(0.81)  # not 1.62: the weight is stopped


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [1.3, 0.5])
def test_hacpo_loss_stops_both_signs_outside_the_clipping_range(ratio, sign):
    out, grad, _ = loss([[0.0]], [-torch.log(t(ratio)).item()], [sign], [1.0], [False])
    assert grad[0, 0] == 0 and out.clipped.item()


def test_hacpo_loss_clips_at_the_sequence_level():
    """Three log-ratios 3, −3, 0.6: the clip of their mean differs from the mean of token clips."""
    config = Config(eps_low=0.2, eps_high=0.2)
    out, *_ = loss([[3.0, -3.0, 0.6]], [0.0], [1.0], [1.0], [True], config=config)
    assert out.loss.item() == pytest.approx(-1.2)
    logp, mask = padded([[3.0, -3.0, 0.6]])
    assert grpo_loss(logp, torch.zeros_like(logp), mask, t([1.0]), config).loss.item() == pytest.approx(
        -0.8166, abs=1e-4
    )


def test_hacpo_loss_counts_rollouts_of_different_length_equally():
    out, grad, _ = loss([[-0.5] * 2, [-0.5] * 10], [-0.5, -0.5], [1.0, 1.0], [1.0, 1.0], [True, True])
    close(out.ratio, [1.0, 1.0])
    assert grad[0].sum().item() == pytest.approx(grad[1].sum().item())


def test_sequence_ratio_of_a_long_rollout_with_noise_stays_near_one():
    noise = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.03
    logp = torch.full((300,), -1.0, dtype=torch.float64)
    ratio = sequence_ratio((logp + noise)[None], torch.ones(1, 300, dtype=torch.bool), t([-1.0]))
    assert ratio.item() == pytest.approx(1.0, abs=0.005)


def test_hacpo_loss_is_zero_on_policy_and_its_gradient_is_not():
    out, grad, _ = loss([[-0.5], [-0.7]], [-0.5, -0.7], [1.0, -1.0], [1.0, 1.0], [True, True])
    assert out.loss.item() == pytest.approx(0.0, abs=1e-12)
    assert grad.abs().sum().item() == pytest.approx(1.0)


def test_clip_band_closes_at_the_eighth_update():
    assert clip_band(0, 0.2, 0.025) == (0.8, 1.0)
    assert clip_band(8, 0.2, 0.025) == (1.0, 1.0)
    assert clip_band(80, 0.2, 0.025) == (1.0, 1.0)


def test_hacpo_loss_of_naive_sharing_treats_peer_as_own():
    rows, source, a = [[0.0], [0.0]], [-0.01, -0.01], [1.0, 1.0]
    naive = Config.preset("naive")
    mixed = loss(rows, source, a, [1.0, 1.0], [True, False], config=naive)[0]
    own = loss(rows, source, a, [1.0, 1.0], [True, True], config=Config.preset("gspo"))[0]
    close(mixed.objective.detach(), own.objective.tolist())


def test_losses_refuse_shapes_that_would_broadcast():
    logp, mask = padded([[-0.1, -0.2], [-0.3, -0.1]])
    good = t([1.0, 1.0])
    with pytest.raises(ValueError, match="advantages has shape"):
        hacpo_loss(logp, mask, good, torch.ones_like(logp), good, torch.tensor([True, True]), 0, Config())
    with pytest.raises(ValueError, match="source_mean_logp has shape"):
        sequence_ratio(logp, mask, t([1.0]))
    with pytest.raises(ValueError, match="same shape"):
        sequence_ratio(logp, mask[:, :1], good)
    with pytest.raises(ValueError, match=r"rollouts \[1\] have no tokens"):
        sequence_ratio(logp, mask & t([[1], [0]]).bool(), good)


def test_kl_to_reference_is_zero_for_equal_policies():
    logp, mask = padded([[-0.5, -0.2], [-1.0]])
    close(kl_to_reference(logp, logp.clone(), mask), [0.0, 0.0])
    # e^d − d − 1 at d = 0.5, by hand
    close(kl_to_reference(t([[-1.0]]), t([[-0.5]]), torch.tensor([[True]])), [0.14872127070012819])


@given(s=st.floats(0.3, 1.5), a=st.floats(-3, 3), w=st.floats(0.1, 10), alpha=st.floats(0, 3), m=st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_hacpo_loss_has_the_gradient_of_the_formula_for_peers(s, a, w, alpha, m):
    """Inside the clipping range d/d(log s) = s^(1+α)·ω·A, outside it 0."""
    out, grad, _ = loss([[0.0]], [-torch.log(t(s)).item()], [a], [w], [False], m, Config(alpha=alpha))
    lower, upper = clip_band(m, 0.2, 0.025)
    inside = lower <= out.ratio.item() <= upper
    assert -grad[0, 0].item() == pytest.approx(s ** (1 + alpha) * w * a if inside else 0.0, rel=1e-6, abs=1e-12)


@given(st.lists(st.lists(st.floats(-5, 0), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_hacpo_loss_without_peers_is_that_of_gspo(rows, m):
    count = len(rows)
    source = [sum(r) / len(r) + 1e-4 * (i - 1) for i, r in enumerate(rows)]
    a = [(-1.0) ** i * (1 + i) for i in range(count)]
    hacpo = loss(rows, source, a, [1.0] * count, [True] * count, m, Config.preset("hacpo", alpha=2.0, delta=0.5))
    gspo = loss(rows, source, a, [1.0] * count, [True] * count, m, Config.preset("gspo"))
    assert torch.equal(hacpo[0].loss, gspo[0].loss) and torch.equal(hacpo[1], gspo[1])


# ── log-probabilities of tokens ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [1, 3, 100])  # parts of a size that divides the rows or leaves a remainder
def test_token_logprobs_and_their_gradient_are_those_of_the_definition(temperature, rows, monkeypatch):
    monkeypatch.setitem(objective.LOGITS_AT_ONCE, "cpu", 11 * rows)
    torch.manual_seed(0)
    logits, ids = (10 * torch.randn(4, 5, 11, dtype=torch.float64)).requires_grad_(), torch.randint(0, 11, (4, 5))
    found = token_logprobs(logits, ids, temperature=temperature)
    expected = torch.log_softmax(logits / temperature, -1).gather(-1, ids[..., None]).squeeze(-1)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, temperature=temperature), (logits,))


def test_token_logprobs_of_half_precision_logits_are_summed_in_float32_without_a_full_copy():
    torch.manual_seed(0)
    logits = torch.randn(64, 2**15).bfloat16().requires_grad_()
    ids, outer = torch.randint(0, 2**15, (64,)), torch.randn(64)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.nbytes for x in [out] if isinstance(x, torch.Tensor) and x.dtype == torch.float32)
            return out

    with Watch():
        found = token_logprobs(logits, ids)
        found.backward(outer)
    assert found.dtype == torch.float32 and max(sizes) <= 4 * 2**19 < 4 * logits.numel() / 2
    wide = logits.detach().double().requires_grad_()
    expected = torch.log_softmax(wide, -1).gather(-1, ids[:, None]).squeeze(-1)
    expected.backward(outer.double())
    assert torch.allclose(found, expected.float(), rtol=1e-6)
    assert torch.allclose(logits.grad.double(), wide.grad, rtol=2**-8, atol=1e-12)


def test_kl_to_reference_has_the_gradient_of_k3():
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, reference_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k3 = kl_to_reference(logp[:, None], reference_logp[:, None], torch.ones(7, 1, dtype=torch.bool))
    (gradient,) = torch.autograd.grad((logp.exp().detach() * k3).sum(), logits, retain_graph=True)
    # Σ (π − π_ref)·∇log π over the vocabulary
    (expected,) = torch.autograd.grad(
        ((logp.exp() - reference_logp.exp()).detach() * logp).sum(), logits, retain_graph=True
    )
    torch.testing.assert_close(gradient, expected)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference_logp)).sum(), logits)
    assert not torch.allclose(gradient, exact, rtol=0.1)
