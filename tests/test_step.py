"""What the tails of all layers allow a step to gain."""

from moetail.bench.step import Tails


def test_the_masks_are_a_cost_of_the_first_arm_alone():
    samples = {"stock": [9.0, 10.0, 90.0], "moetail": [4.0, 4.0, 5.0], "other": [7.0] * 3, "masks": [2.0, 3.0, 3.0]}
    tails = Tails(samples, 4, T=8, K=2, H=64, dtype="bfloat16", weights_dtype="float32")
    assert tails.gain_us("stock", "moetail") == (10 + 3 - 4) * 4
    assert tails.gain_us("moetail", "stock") == -tails.gain_us("stock", "moetail")
    assert tails.gain_us("other", "moetail") == (7 - 4) * 4
    without = Tails({"a": [5.0], "b": [2.0]}, 1, T=8, K=2, H=64, dtype="bfloat16", weights_dtype="float32")
    assert without.gain_us("a", "b") == 3
