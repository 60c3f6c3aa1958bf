"""Deferred admission: prompts wait for decode steps, never for nothing, and never for longer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from loraforge.runtime.deferred import DeferredAdmission

CHUNK = 4  # tokens of a prompt that fit a step


@dataclass
class Request:
    prompt: int
    output: int


@dataclass(frozen=True)
class Step:
    held: bool
    could_decode: bool
    waiting: bool  # whether a prompt, or the rest of one, was there to be computed
    prefill: int
    decode: int


def _serve(decode_steps: int, arrivals: list[list[tuple[int, int]]], aborts: set[int]) -> list[Step]:
    """An engine of one number a token. ``arrivals``: (prompt, output) tokens of the requests before each step.
    ``aborts``: steps before which everything that decodes goes away."""
    admission = DeferredAdmission(decode_steps)
    prompts: list[Request] = []
    decoding: list[Request] = []
    steps = []
    for number in range(len(arrivals) + 1000):
        prompts += [Request(*sizes) for sizes in (arrivals[number] if number < len(arrivals) else [])]
        if number in aborts:
            decoding.clear()
        if not prompts and not decoding:
            if number >= len(arrivals):
                return steps
            steps.append(Step(False, False, False, 0, 0))
            admission.ran(0, 0)
            continue
        held = admission.holds(bool(decoding))
        made, waiting, computed = len(decoding), bool(prompts), 0
        done: list[Request] = []
        if not held and prompts:
            computed = min(CHUNK, prompts[0].prompt)
            prompts[0].prompt -= computed
            if not prompts[0].prompt:
                done.append(prompts.pop(0))
        for request in decoding:
            request.output -= 1
        decoding = [request for request in [*decoding, *done] if request.output]
        steps.append(Step(held, bool(made), waiting, computed, made))
        admission.ran(computed, made)
    raise AssertionError("requests starve")


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 5),
    st.lists(st.lists(st.tuples(st.integers(1, 11), st.integers(0, 9)), max_size=3), max_size=25),
    st.sets(st.integers(0, 40), max_size=5),
)
def test_prompts_wait_for_that_many_decode_steps_and_no_more(
    decode_steps: int, arrivals: list[list[tuple[int, int]]], aborts: set[int]
) -> None:
    decodes: int | None = None  # steps that decoded since the last with a prompt
    for step in _serve(decode_steps, arrivals, aborts):
        if step.held:
            assert step.could_decode
            assert not step.prefill
            assert step.decode
            assert decodes is not None
            assert decodes < decode_steps
        elif step.waiting:
            assert step.prefill  # admitted at once where nothing decodes
            assert not step.could_decode or decodes is None or decodes >= decode_steps
        if step.prefill:
            decodes = 0
        elif step.decode and decodes is not None:
            decodes += 1


def test_steps_without_tokens_do_not_count() -> None:
    admission = DeferredAdmission(2)
    admission.ran(5, 3)
    for _ in range(9):
        admission.ran(0, 0)
        assert admission.holds(True)
    admission.ran(0, 3)
    assert admission.holds(True)
    admission.ran(0, 1)
    assert not admission.holds(True)


def test_zero_steps_hold_nothing() -> None:
    admission = DeferredAdmission(0)
    admission.ran(5, 3)
    assert not admission.holds(True)
