"""The automatic budget: cost curve, calibration and choice of nodes, each against what it must find."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from jetspec.clock import Clock
from jetspec.engine import AutoBudget, Engine, EngineStep, Observer, Sequence
from jetspec.engine.batch import Allocation, Round, ScheduledSequence, Selection
from jetspec.errors import JetSpecError
from jetspec.models.cost import CostModel, TimeCurve, measure
from jetspec.sampling import SamplingParams
from jetspec.tree import Forest, Walk, forest_of
from jetspec.tree.calibration import Calibration, Nodes
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import (
    finish,
    known_answers,
    make_params,
    make_prompts,
    make_target,
    random_head,
    references,
    run,
)
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE
from tests.tree.test_tree_forest import forests


class FrozenCost(CostModel):
    """A cost model that learns nothing, so that decisions do not depend on the machine."""

    def observe_verify(self, rows: int, keys: int, seconds: float) -> None:
        pass

    def observe_draft(self, sequences: int, seconds: float) -> None:
        pass


def cost(per_row: float, draft: float = 0.0, knee: int = 1) -> FrozenCost:
    """One second up to `knee` rows, then `per_row` more for each."""
    rows = TimeCurve([1, knee, knee + 1, 4096], [1, 1, 1 + per_row, 1 + per_row * (4096 - knee)])
    return FrozenCost(rows, draft=TimeCurve([1], [draft]))


def sequences(engine: Engine, number: int, max_tokens: int = 200) -> list[Sequence]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [engine.add(str(i), [1 + i, 2, 3], params) for i in range(number)]


def selected(budget: AutoBudget, forest: Forest, running: list[Sequence], *, is_trial: bool = False) -> Selection:
    return budget.select(Allocation(running, [64] * len(running), is_trial), forest)


def played_round(budget: AutoBudget, running: list[Sequence], forest: Forest, *, granted: int | None = None) -> Round:
    """A round in which `forest` was drafted and only the roots were accepted."""
    asked = budget.allocate(running).rows
    scheduled = []
    for sequence, rows in zip(running, asked, strict=True):
        one = ScheduledSequence(sequence, granted or max(rows, 2), sequence.num_cached, decodes=True)
        one.walk = Walk([0], [5])
        scheduled.append(one)
    current = Round(scheduled, Allocation([], []).granted(scheduled), Clock(torch.device("cpu")))
    current.selection = budget.select(current.allocation, forest)
    for index, one in enumerate(scheduled):
        one.set_tree(current.selection.forest, index)
    current.seconds = current.clock.seconds()
    return current


def confident(number: int) -> Forest:
    """Trees of one path of probability 0.9, 0.81, .. and a useless sibling at each step."""
    log_probs = [0.0]
    tokens, parents = [0], [-1]
    spine = 0
    for d in range(1, 8):
        at = len(tokens)
        tokens += [d, 100 + d]
        parents += [spine, spine]
        log_probs += [d * float(np.log(0.9)), (d - 1) * float(np.log(0.9)) + float(np.log(0.01))]
        spine = at
    return forest_of([(tokens, parents, log_probs)] * number)


@pytest.fixture
def engine() -> Engine:
    return Engine(make_target(), num_blocks=400, kv_block_size=4)


def test_curve_is_linear_between_points_and_never_falls() -> None:
    curve = TimeCurve([1, 2, 4], [1.0, 0.5, 3.0])
    assert curve(np.array([0, 1, 2, 3, 4, 6])).tolist() == pytest.approx([1, 1, 1, 2, 3, 5])


def test_curve_learns() -> None:
    curve = TimeCurve([1, 2, 4, 8, 16], [1.0] * 5)
    generator = random.Random(0)
    for _ in range(600):
        n = generator.randint(1, 16)
        curve.observe(n, (2 + 0.5 * n) * generator.uniform(0.9, 1.1))
    for n in (1, 4, 8, 16):
        assert float(curve(n)) == pytest.approx(2 + 0.5 * n, rel=0.12)


def test_one_slow_round_does_not_upset_the_curve() -> None:
    curve = TimeCurve([1, 2, 4], [1.0, 1.0, 1.0])
    curve.observe(2, 1000.0)
    assert float(curve(2)) < 1.2


def test_measure_gives_a_usable_model() -> None:
    target = make_target("qwen3_moe")
    model = measure(target, target.new_cache(64, 4), 64, target_layer_ids=(0, 1))
    assert 0 < model.verify_seconds(1, 0) <= model.verify_seconds(64, 0) <= model.verify_seconds(64, 64 * 1000)
    assert model.draft_seconds(3) == 0
    model.observe_draft(2, 60.0)  # the first draft of all counts for nothing
    assert model.draft_seconds(2) == 0
    model.observe_draft(2, 0.5)
    assert model.draft_seconds(2) == pytest.approx(0.5)
    assert model.draft_seconds(4) > model.draft_seconds(1) > 0


@settings(max_examples=30)
@given(forests())
def test_corrected_paths_never_gain(case: tuple[Forest, list[list[int]]]) -> None:
    forest, _ = case
    nodes = Nodes(forest, [0] * forest.num_trees)
    calibration = Calibration()
    everything = np.ones(len(forest.tokens), dtype=bool)
    calibration.observe(nodes, everything, nodes.parents != np.arange(len(everything)))
    paths = calibration.path_probabilities(nodes)
    assert (paths <= paths[nodes.parents]).all()
    assert ((paths >= 0) & (paths <= 1)).all()


def test_calibration_finds_the_true_rates() -> None:
    """A drafter that says 0.6 and 0.3 everywhere, where the truth is 0.9 and 0.05 for greedy, 0.3 and 0.3 for sampled
    requests."""
    truth = {0: (0.9, 0.05), 1: (0.3, 0.3)}
    forest = forest_of([([0, 1, 2], [-1, 0, 0], [0.0, float(np.log(0.6)), float(np.log(0.3))])] * 2)
    nodes = Nodes(forest, [0, 1])
    calibration = Calibration(kinds=2)
    generator = random.Random(0)
    at_stake = np.array([False, True, True] * 2)
    for _ in range(1500):
        visited = []
        for kind in (0, 1):
            u = generator.random()
            first, second = truth[kind]
            visited += [True, u < first, first <= u < first + second]
        calibration.observe(nodes, np.array(visited), at_stake)
    paths = calibration.path_probabilities(nodes)
    assert paths[[1, 4]] == pytest.approx([0.9, 0.3], abs=0.06)
    assert paths[[2, 5]] == pytest.approx([0.05, 0.3], abs=0.06)


def test_what_was_not_at_stake_teaches_nothing() -> None:
    forest = confident(1)
    nodes = Nodes(forest, [0])
    calibration = Calibration()
    nothing = np.zeros(len(forest.tokens), dtype=bool)
    before = calibration.ratios
    calibration.observe(nodes, nothing, nothing)
    assert (calibration.ratios == before).all()


@pytest.mark.parametrize("per_row", [0.0, 0.05, 0.2, 0.5, 2.0])
@pytest.mark.parametrize("number", [1, 3, 16])
def test_selection_is_the_best_of_all_prefixes(engine: Engine, per_row: float, number: int) -> None:
    """Against a search through every number of nodes, most probable first."""
    budget = AutoBudget(cost(per_row, draft=0.3))
    forest = confident(number)
    selection = selected(budget, forest, sequences(engine, number))
    probabilities = sorted(np.exp(forest.log_probs[forest.parents >= 0].double().numpy()), reverse=True)
    rates = [
        (number + sum(probabilities[:k])) / (1 + per_row * (number + k - 1) + 0.3)
        for k in range(len(probabilities) + 1)
    ]
    assert selection.expected_tokens / selection.expected_seconds == pytest.approx(max(rates))
    size = len(selection.forest.tokens) - number
    assert rates[size] == pytest.approx(max(rates))
    if per_row == 2.0:
        assert size == 0
    if per_row == 0:
        assert size == len(probabilities)


def test_nodes_go_where_they_are_worth_most(engine: Engine) -> None:
    """Of two sequences the one with the confident draft gets the larger tree."""
    weak = ([0, 1, 2], [-1, 0, 1], [0.0, float(np.log(0.2)), float(np.log(0.04))])
    strong = ([0, 1, 2], [-1, 0, 1], [0.0, float(np.log(0.9)), float(np.log(0.8))])
    selection = selected(AutoBudget(cost(0.3)), forest_of([weak, strong]), sequences(engine, 2))
    assert np.diff(selection.forest.offsets).tolist() == [1, 3]


def test_long_contexts_make_nodes_dearer(engine: Engine) -> None:
    running, sizes = sequences(engine, 1), []
    for context in (0, 1000):
        model = cost(0.05)
        model.key_seconds = 1e-3
        running[0].num_cached = context
        selection = selected(AutoBudget(model), confident(1), running)
        sizes.append(len(selection.forest.tokens))
    assert sizes[0] > sizes[1]


def test_high_concurrency_ends_in_plain_decoding(engine: Engine) -> None:
    """Up to 16 rows are free: one sequence gets a tree, sixteen are not even drafted for."""
    budget = AutoBudget(cost(0.2, draft=0.1, knee=16))
    few = sequences(engine, 1)
    for _ in range(10):
        current = played_round(budget, few, confident(1))
        assert len(current.selection.forest.tokens) > 8
        budget.observe(current)
    assert budget.allocate(few).rows[0] > 8
    many = [few[0]] * 64
    assert budget.allocate(many).rows == [1] * 64
    assert budget.allocate(few).rows[0] > 8


def test_fewer_granted_rows_say_nothing_of_the_nodes_beyond(engine: Engine) -> None:
    """Under load trees are cut short; the nodes that had no room are not learned as worthless."""
    budget, running = AutoBudget(cost(0.0)), sequences(engine, 1)
    budget.observe(played_round(budget, running, confident(1)))
    before = budget.mean_gains()
    for _ in range(50):
        small = confident(1).keep(torch.arange(15) < 3)
        budget.observe(played_round(budget, running, small, granted=3))
    assert np.allclose(budget.mean_gains()[2:], before[2:])


def test_the_end_of_a_request_says_nothing_of_deeper_nodes(engine: Engine) -> None:
    """Close to max_tokens trees are shallow; what would have come deeper is not learned as worthless."""
    budget, running = AutoBudget(cost(0.0)), sequences(engine, 1)
    budget.observe(played_round(budget, running, confident(1)))
    before = budget.mean_gains()
    running[0].max_new_tokens = running[0].num_output + 2  # one node deep
    assert running[0].max_depth == 1
    for _ in range(50):
        shallow = confident(1).keep(torch.arange(15) < 3)
        budget.observe(played_round(budget, running, shallow))
    assert np.allclose(budget.mean_gains()[2:], before[2:])


def test_a_drafter_that_stops_early_is_learned(engine: Engine) -> None:
    """Rows that were granted and not drafted are worth nothing."""
    budget, running = AutoBudget(cost(0.0)), sequences(engine, 1)
    budget.observe(played_round(budget, running, confident(1)))
    for _ in range(50):
        budget.observe(played_round(budget, running, confident(1).keep(torch.arange(15) < 3)))
    assert budget.mean_gains()[2:].max() < 0.01


def test_trials_take_turns(engine: Engine) -> None:
    """Where drafting does not pay, every sequence is tried in its turn, also at the longest pause."""
    budget, running = AutoBudget(cost(1.0, draft=50.0)), sequences(engine, 5)
    budget.observe(played_round(budget, running, confident(5)))
    tried = []
    while len(tried) < 12:
        allocation = budget.allocate(running)
        if allocation.is_trial:
            tried += [index for index, rows in enumerate(allocation.rows) if rows > 1]
    assert set(tried[-5:]) == set(range(5))


def test_a_round_keeps_its_own_trial_flag(engine: Engine) -> None:
    """Two rounds in flight do not mix: the flag travels with the allocation."""
    budget, running = AutoBudget(cost(1.0, draft=50.0)), sequences(engine, 2)
    budget.observe(played_round(budget, running, confident(2)))
    trial = next(a for a in (budget.allocate(running) for _ in range(100)) if a.is_trial)
    budget.allocate(running)
    assert len(budget.select(trial, confident(2)).forest.tokens) > 2


class Recorder(Observer):
    def __init__(self) -> None:
        self.steps: list[EngineStep] = []

    def step(self, record: EngineStep) -> None:
        self.steps.append(record)


def simulated_seconds(model: CostModel, steps: list[EngineStep]) -> float:
    return sum(
        float(model.verify_seconds(s.rows, 0)) + (model.draft_seconds(s.drafted) if s.drafted else 0) for s in steps
    )


@pytest.mark.parametrize("kind", ["liar", pytest.param("random head", marks=pytest.mark.slow)])
def test_a_useless_drafter_costs_little(kind: str) -> None:
    """Seconds by the model, of a draft that costs a fifth of a forward: at most 5% above plain decoding's."""
    target, recorder, model = make_target(), Recorder(), cost(0.03, draft=0.2)
    prompt = [1, 2, 3]
    limit = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    alone = Engine(target, num_blocks=64)
    (truth,) = run(alone, [prompt], [limit])
    draft = (
        random_head(target) if kind == "random head" else OracleDrafter({tuple(prompt): truth[0]}, VOCAB_SIZE, hit=0)
    )
    engine = Engine(target, draft, tree_budget=AutoBudget(model), num_blocks=64, observer=recorder)
    assert run(engine, [prompt], [limit]) == [truth]
    assert run(engine, [prompt], [limit]) == [truth]
    assert simulated_seconds(model, recorder.steps) < 1.05 * 240
    assert sum(s.drafted for s in recorder.steps) >= 5, "a drafter must be tried before it is given up"


def test_drafting_resumes_when_it_pays_again() -> None:
    target = make_target()
    prompt = [9, 8, 7]
    limit = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (truth,) = run(Engine(target, num_blocks=64), [prompt], [limit])
    drafter = OracleDrafter({tuple(prompt): truth[0]}, VOCAB_SIZE, hit=0.0)
    engine = Engine(target, drafter, tree_budget=AutoBudget(cost(0.03, draft=0.2)), num_blocks=64)
    run(engine, [prompt], [limit])
    drafter.hit = 1.0
    for _ in range(6):
        [sequence] = finish(engine, [prompt], [limit])
    assert sequence.metrics.acceptance_length > 2


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_automatic_trees_change_no_token(kind: str, temperature: float) -> None:
    target = make_target(kind)
    prompts, params = make_prompts(5), make_params(5, temperature)
    known = known_answers(kind, prompts, params)
    engine = Engine(
        target,
        OracleDrafter(known, VOCAB_SIZE, hit=0.7),
        tree_budget=AutoBudget(cost(0.08, draft=0.1, knee=6)),
        num_blocks=64,
        kv_block_size=4,
        max_num_batched_tokens=64,
    )
    assert run(engine, prompts, params) == references(kind, prompts, params)


@pytest.mark.parametrize("value", [0, -1, 4.5, "many", True, None])
def test_bad_budgets_are_refused(value: object) -> None:
    with pytest.raises(JetSpecError, match="tree_budget"):
        Engine(make_target(), tree_budget=value)  # type: ignore[arg-type]
