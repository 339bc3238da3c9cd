"""mHC: the worked examples (hc 2 and 3), the order of the Sinkhorn steps, and what must stay fp32."""

from types import SimpleNamespace

import pytest
import torch

from moetail.models import deepseek_v41
from moetail.models.deepseek_v41 import Decoder, Layer, Stream
from moetail.models.hyper_connections import MixParameters, mixes, one_hot, post
from moetail.models.parallel import TensorParallel
from moetail.models.parameters import Parameters
from moetail.models.tails import ARMS, Partial
from moetail.ops.mhc_collapse import mhc_collapse
from moetail.reference import sinkhorn
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
EPS, HC_EPS = 1e-20, 1e-6
E = torch.tensor([1.5, -0.75], dtype=BF16)
ATTN = MixParameters(
    torch.tensor([
        [.5, -.25, .1, .3], [-.2, .4, .6, -.1], [.3, .3, -.3, .2], [.1, -.5, .2, .4],
        [.7, .1, -.2, .5], [-.4, .2, .3, -.6], [.2, -.1, .5, .1], [-.3, .6, -.2, .4],
    ]),
    torch.tensor([.1, -.1, .2, 0, .3, -.3, 0, .1]), torch.tensor([1, .5, 2]),
)  # fmt: skip
FFN = MixParameters(
    torch.tensor([
        [-.1, .2, .4, .3], [.6, -.3, .1, .2], [.2, .1, .5, -.4], [-.5, .3, .2, .1],
        [.3, -.6, .4, .2], [.1, .5, -.3, .7], [-.2, .4, .6, -.1], [.5, .2, -.4, .3],
    ]),
    torch.tensor([0, .2, -.1, .1, .2, 0, -.2, .4]), torch.tensor([.8, 1, 1.5]),
)  # fmt: skip
Y_ATTN, Y_FFN = torch.tensor([[0.5, 1]], dtype=BF16), torch.tensor([[-1, 0.25]], dtype=BF16)
S1 = [[2.015625, 0.271484375], [2.0625, 0.359375]]
S2 = [[0.6484375, 0.64453125], [1.1640625, 0.5546875]]


def bf16(values):
    return torch.tensor(values, dtype=BF16)


def normed(S, pre):
    """The norm of the collapse, all weights 1."""
    ones = torch.ones(S.shape[2], dtype=BF16)
    return mhc_collapse(S, pre_mix=pre, norm_weight=ones, eps=EPS)


def near(got, want):
    """The digits that the example has."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1.5e-7)


def test_the_mixes_of_example_a():  # pitfalls 3, 5 and 6
    S0 = E.repeat(1, 2, 1)
    m = mixes(S0, ATTN, EPS, HC_EPS, 20)
    near(m.pre, [[0.6957898, 0.5538483]])
    near(m.post, [[1.0209399, 1.1102300]])
    near(m.comb, [[[0.1579147, 0.8420844], [0.8420843, 0.1579146]]])
    m = mixes(bf16([S1]), FFN, EPS, HC_EPS, 20)
    near(m.pre, [[0.6060205, 0.7252705]])
    near(m.post, [[1.3812103, 0.8867472]])
    near(m.comb, [[[0.6930531, 0.3069459], [0.3069460, 0.6930531]]])


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_a_layer_runs_example_a(monkeypatch, arm):  # pitfalls 2 and 7
    """The decoder's own layer, around sublayers that return what the example pretends."""
    inputs = []

    def attention(x, *_, **__):
        inputs.append(x)
        return Y_ATTN

    def moe(self, layer, x, *_):
        inputs.append(x)
        return Partial(Y_FFN)

    monkeypatch.setattr(deepseek_v41, "attention", attention)
    monkeypatch.setattr(Decoder, "_moe", moe)
    decoder = Decoder.__new__(Decoder)
    decoder.tp, decoder.norm = TensorParallel(), torch.ones(2, dtype=BF16)
    decoder.config = SimpleNamespace(
        rms_norm_eps=EPS, hc_eps=HC_EPS, hc_sinkhorn_iters=20, routed_scaling_factor=1.5, swiglu_limit=10.0
    )
    ones = torch.ones(2, dtype=BF16)
    layer = Layer(0, ones, ones, ATTN, FFN, None, None, None, None, True)
    S0 = E.repeat(1, 2, 1)
    handed = decoder._run(layer, Stream(S0, one_hot(S0)), None, None, {True: None}, arm)
    out = decoder._finished(handed, arm)
    assert_same_bits(inputs[0], bf16([[1.265625, -0.6328125]]))
    assert_same_bits(inputs[1], bf16([[1.3984375, 0.21289062]]))
    assert_same_bits(out.S, bf16([S2]))
    near(out.pre, [[0.6060205, 0.7252705]])
    assert_same_bits(decoder.hidden(out), bf16([[1.1875, 0.765625]]))
    assert_same_bits(decoder._normed(handed, arm), bf16([[1.1875, 0.765625]]))


def test_post_and_collapse_of_example_a():
    S0, m = E.repeat(1, 2, 1), mixes(E.repeat(1, 2, 1), ATTN, EPS, HC_EPS, 20)
    assert_same_bits(post(Y_ATTN, S0, m.post, m.comb), bf16([S1]))
    assert_same_bits(normed(bf16([S1]), m.pre), bf16([[1.3984375, 0.21289062]]))
    assert_same_bits(normed(bf16([S2]), torch.tensor([[0.6060205, 0.7252705]])), bf16([[1.1875, 0.765625]]))


def test_comb_is_source_by_target():  # pitfall 1: hc = 2 cannot show it
    A = torch.tensor([[[0.0, 1, 2], [2, 0, 1], [0, 0, 1]]])
    comb = sinkhorn(A, HC_EPS, 20)
    want = [[.095852, .452073, .452074], [.680440, .159780, .159779], [.223707, .388146, .388146]]  # fmt: skip
    torch.testing.assert_close(comb[0], torch.tensor(want), rtol=0, atol=1e-6)
    S, y = bf16([[[1, 0], [0, 2], [-1, 4]]]), bf16([[0.5, -1]])
    got = post(y, S, torch.tensor([[1, 0.5, 2]]), comb)
    assert_same_bits(got, bf16([[[0.373046875, 1.2578125], [0.314453125, 1.375], [1.0625, -0.1279296875]]]))


def by_steps(A, eps, iterations):
    comb = A.double().exp()
    comb = comb / comb.sum(2, keepdim=True) + eps
    for step in range(2 * iterations - 1):
        comb = comb / (comb.sum(1 if step % 2 == 0 else 2, keepdim=True) + eps)
    return comb.float()


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_softmax_is_the_first_row_step_and_columns_are_last(iterations):  # pitfall 6
    A = torch.randn(5, 4, 4)
    got = sinkhorn(A, HC_EPS, iterations)
    torch.testing.assert_close(got, by_steps(A, HC_EPS, iterations))
    torch.testing.assert_close(got.sum(1), torch.ones(5, 4))
    assert (got.sum(2) - 1).abs().max() > 1e-3  # so few steps leave the rows off


def test_eps_is_in_every_denominator():  # pitfall 3: at 1e-6 later steps hide most of it
    A = torch.randn(5, 4, 4)
    torch.testing.assert_close(sinkhorn(A, 0.1, 3), by_steps(A, 0.1, 3))


def test_small_streams_mix_like_large_ones():  # pitfall 3
    p = MixParameters.random(Parameters(torch.device("cpu")), "x", 3, 8)
    S = torch.randn(6, 3, 8).to(BF16)
    small, large = mixes(S * 2.0**-12, p, EPS, HC_EPS, 20), mixes(S, p, EPS, HC_EPS, 20)
    torch.testing.assert_close(small.pre, large.pre)
    torch.testing.assert_close(small.comb, large.comb)


def test_the_mixes_and_their_parameters_are_fp32():  # pitfall 4
    p = MixParameters.random(Parameters(torch.device("cpu")), "x", 3, 8)
    m = mixes(torch.randn(6, 3, 8).to(BF16), p, EPS, HC_EPS, 20)
    assert {t.dtype for t in (*vars(p).values(), *vars(m).values())} == {torch.float32}
    assert (p.fn.to(BF16).float() != p.fn).any() and (m.post.to(BF16).float() != m.post).any()
    assert (m.comb - m.comb.transpose(1, 2)).abs().max() > 0.1  # random parameters exercise the asymmetry


def test_the_norm_reads_the_rounded_collapse():  # pitfall 7
    S, pre = torch.randn(64, 4, 32).to(BF16), torch.rand(64, 4)
    c = (pre[:, :, None] * S.float()).sum(1)
    rounded = c.to(BF16).float()
    want = (rounded * torch.rsqrt(rounded.square().mean(1, keepdim=True) + EPS)).to(BF16)
    got = normed(S, pre)
    assert_same_bits(got, want)
    assert (got != (c * torch.rsqrt(c.square().mean(1, keepdim=True) + EPS)).to(BF16)).any()
