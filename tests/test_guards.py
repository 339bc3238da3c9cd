"""no_jit sees a compilation, chains and restores what was there, and stays silent otherwise."""

import pytest

from moetail import guards


def test_numba_compilation_is_seen():
    import numba

    @numba.njit
    def fresh(x):
        return x + 1

    with guards.no_jit("warn") as seen, pytest.warns(RuntimeWarning, match="numba compiled .*fresh"):
        fresh(1)
    assert [event.compiler for event in seen] == ["numba"]
    with guards.no_jit() as seen:
        fresh(2)
    assert seen == []
    with pytest.raises(RuntimeError, match="fresh"), guards.no_jit():
        fresh(1.5)  # another specialization


def test_triton_hook_is_chained_and_restored():
    from triton import knobs

    calls = []
    knobs.runtime.jit_post_compile_hook = before = lambda **event: calls.append(event["repr"])
    try:
        with guards.no_jit("warn") as seen:
            kernel = type("Fn", (), {"name": "finalize"})
            with pytest.warns(RuntimeWarning, match="triton compiled finalize: T is 1"):
                knobs.runtime.jit_post_compile_hook(fn=kernel, repr="T is 1", is_manual_warmup=False)
            with pytest.warns(RuntimeWarning, match="warm-up"):
                knobs.runtime.jit_post_compile_hook(fn=kernel, repr="warm-up", is_manual_warmup=True)
        assert calls == ["T is 1", "warm-up"] and len(seen) == 2
        assert knobs.runtime.jit_post_compile_hook is before
    finally:
        knobs.runtime.jit_post_compile_hook = None


def test_the_hook_is_put_back_after_an_error():
    from triton import knobs

    with pytest.raises(KeyError), guards.no_jit():
        raise KeyError
    assert knobs.runtime.jit_post_compile_hook is None


def test_unknown_mode():
    with pytest.raises(ValueError, match="^mode must"), guards.no_jit("off"):
        pass


@pytest.mark.gpu
def test_a_real_triton_compilation_is_seen():
    import moetail
    from moetail.testing import finalize_inputs

    x = finalize_inputs(2, 3, 328, device="cuda")  # a hidden size no other test has
    with pytest.raises(RuntimeError, match="_finalize_kernel"), guards.no_jit():
        moetail.finalize(x.rows, x.row_map, x.weights)
    moetail.finalize(x.rows, x.row_map, x.weights)  # the configs of the other T
    with guards.no_jit():
        moetail.finalize(x.rows, x.row_map, x.weights)
