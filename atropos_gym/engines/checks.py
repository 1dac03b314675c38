"""What is tried of an engine before a run relies on it; the same for every engine.

A fixed prompt is sampled: ids and logprobs must come back, and be the learner's under the same weights at the
run's temperature. Then a *canary*, an adapter with large known weights, must move the engine's logprobs as it
moves the learner's. All that can be found is found before anything stops, so that it is mended in one go.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atropos_gym.engines._agreement import Agreement, Logprobs, judge_adapter, judge_agreement
from atropos_gym.engines.base import MASKS, Completion, Engine, Reference, SamplingParams
from atropos_gym.errors import EngineError
from atropos_gym.findings import Finding

__all__ = [
    "Agreement",
    "agreement",
    "check_engine",
    "judge_adapter",
    "judge_agreement",
    "sampling_findings",
]

#: Mean change of logprobs by the canary, in nats, so that no precision hides it.
CANARY_MOVE = 0.5
#: A logprob this far above 0 is rounding.
ROUNDING = 1e-3

TEXT = (
    "The quick brown fox jumps over the lazy dog, counts to 17, and says: every number from 1 to 12 has a "
    "name, and the first of them is"
)
SAMPLES = 4
MOST_IDS = 16
SEED = 0x5EED

#: What each field must be where rollouts are trained on.
_NEUTRAL = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
}


# -- before any request --------------------------------------------------------------------------------


def sampling_findings(params: SamplingParams) -> list[Finding]:
    """Returns what makes samples untrainable: a learner's plain softmax is not what they are drawn from.

    Example:
        >>> [found.remedy for found in sampling_findings(SamplingParams(max_tokens=1, top_p=0.9))]
        ['set top_p=1']
    """
    found = []
    if params.temperature == 0:
        found.append(
            Finding(
                "sampling", "wrong", "temperature=0 samples nothing", "set a temperature above 0, such as 1"
            )
        )
    for name, right in _NEUTRAL.items():
        value = getattr(params, name)
        off = value < 1 if name == "top_k" else value == right  # 0 and -1 both switch top_k off
        if not off:
            detail = f"{name}={value} cuts or bends the distribution that the learner computes"
            found.append(Finding("sampling", "wrong", detail, f"set {name}={right}"))
    for name in MASKS:
        if getattr(params, name) is not None:
            detail = f"{name} masks ids that the learner counts"
            found.append(Finding("sampling", "wrong", detail, f"leave {name} out"))
    return found


# -- requests ------------------------------------------------------------------------------------------


async def check_engine(engine: Engine, reference: Reference | None = None) -> list[Finding]:
    """Tries an engine and returns all findings; those that are ``wrong`` are errors for training.

    It samples the base (version 0) and a trial version, so it disturbs no version that is served.

    Args:
        engine: what is tried.
        reference: the learner's scorer; without it agreement and adapters cannot be told.
    """
    trial = _Trial(engine, reference)
    if not await trial.sample():
        return trial.findings
    await trial.stop_ids()
    if reference is None:
        await trial.temperature_alone()
        return trial.findings
    await trial.vocabulary(reference)
    await trial.agreement(reference)
    await trial.canary(reference)
    return trial.findings


async def agreement(engine: Engine, reference: Reference) -> Agreement:
    """Returns how well engine and learner agree on the base model, at the run's temperature.

    Raises:
        EngineError: the engine gave no usable samples; ``check_engine`` says why.
    """
    trial = _Trial(engine, reference)
    if not await trial.sample():
        raise EngineError("; ".join(found.detail for found in trial.findings))
    return Agreement.of(trial.engine_logprobs(), trial.score(reference, None, reference.temperature))


@dataclass(slots=True)
class _Trial:
    """One check: what was sampled and found so far."""

    engine: Engine
    reference: Reference | None
    findings: list[Finding] = field(default_factory=list)
    samples: list[Completion] = field(default_factory=list)
    noise: float = 0.0

    @property
    def prompt(self) -> list[int]:
        room = max(1, self.engine.max_context - MOST_IDS)
        return self.engine.tokenizer.encode(TEXT)[:room]

    @property
    def temperature(self) -> float:
        return 1.0 if self.reference is None else self.reference.temperature

    def say(self, *finding: str) -> None:
        self.findings.append(Finding(*finding))  # type: ignore[arg-type]

    async def ask(
        self, version: int, n: int = SAMPLES, **changes: float | tuple[int, ...]
    ) -> list[Completion]:
        params = SamplingParams(max_tokens=MOST_IDS, temperature=self.temperature, seed=SEED)
        return await self.engine.generate(self.prompt, params.with_(**changes), n, version=version)

    async def sample(self) -> bool:
        """Samples the base; False where what comes back is unusable."""
        name = "ids and logprobs"
        try:
            self.samples = await self.ask(version=0)
        except EngineError as error:
            self.say(name, "wrong", f"the fixed prompt was not answered: {error}")
            return False
        for number, sample in enumerate(self.samples):
            fault = _fault(sample, self.engine.tokenizer.rows)
            if fault is not None:
                self.say(name, "wrong", f"sample {number} of {SAMPLES}: {fault[0]}", fault[1])
                return False
        if len(self.samples) != SAMPLES:
            self.say(name, "wrong", f"{SAMPLES} samples were asked for, {len(self.samples)} came back")
            return False
        self.say(name, "ok", f"{sum(len(s.ids) for s in self.samples)} ids came back, each with its logprob")
        return True

    async def stop_ids(self) -> None:
        """Whether samples end with the first stop id that they draw, and keep it.

        Ids that were drawn before are likely again, and no more: not every engine honours a seed.
        """
        name, stops = "stop ids", frozenset(sample.ids[0] for sample in self.samples)
        try:
            drawn = await self.ask(version=0, n=2 * SAMPLES, stop_ids=tuple(sorted(stops)))
        except EngineError as error:
            self.say(name, "wrong", f"a request with stop ids was not answered: {error}")
            return
        for sample in drawn:
            if fault := _stop_fault(sample, stops):
                remedy = (
                    "the server must end at stop_token_ids and return the id: pass them through any proxy"
                )
                self.say(name, "wrong", fault, remedy)
                return
        stopped = sum(sample.ids[-1:] != () and sample.ids[-1] in stops for sample in drawn)
        if stopped:
            self.say(name, "ok", f"{stopped} of {len(drawn)} samples end with the stop id that they drew")
        else:
            self.say(name, "note", f"{len(drawn)} samples drew none of {len(stops)} stop ids: not told")

    async def temperature_alone(self) -> None:
        """Whether logprobs follow the temperature, told without a learner."""
        try:
            warm = _first_ids(await self.ask(version=0, n=16, max_tokens=1, temperature=1.0))
            cold = _first_ids(await self.ask(version=0, n=16, max_tokens=1, temperature=0.7))
        except EngineError as error:
            self.say("temperature", "wrong", f"a request was not answered: {error}")
            return
        both = sorted(set(warm) & set(cold))
        if not both:
            self.say("temperature", "note", "two temperatures drew no common id: not told")
        elif max(abs(warm[i] - cold[i]) for i in both) <= 1e-6:
            self.say(
                "temperature",
                "note",
                "logprobs do not follow the temperature: training is right at temperature 1 only",
                "start the server with --logprobs-mode processed_logprobs",
            )
        else:
            self.say("temperature", "ok", "logprobs follow the temperature")
        self.say(
            "agreement",
            "note",
            "not tried: there is no learner to compare with",
            "name its model with --model",
        )

    async def vocabulary(self, reference: Reference) -> None:
        """Whether ids mean the same, up to the last of them."""
        name, own, other = "vocabulary", self.engine.tokenizer, reference.tokenizer
        if own.fingerprint != other.fingerprint:
            self.say(
                name,
                "wrong",
                f"the engine speaks the ids of tokenizer {own.name} ({own.fingerprint[:15]}), "
                f"the learner those of {other.name} ({other.fingerprint[:15]})",
                "give both the same model folder",
            )
            return
        last = min(len(other), reference.rows) - 1
        prompt = [*self.prompt[:4], last]
        try:
            await self.engine.generate(prompt, SamplingParams(max_tokens=1, seed=SEED), version=0)
        except EngineError as error:
            self.say(
                name, "wrong", f"the learner's last id {last} is not taken: {error}", "use one model folder"
            )
        else:
            self.say(name, "ok", f"{reference.rows} rows, all ids up to {last} are taken")

    async def agreement(self, reference: Reference) -> None:
        """Whether logprobs are those of the learner's base."""
        engine_K = self.engine_logprobs()
        learner_K = self.score(reference, None, reference.temperature)
        unscaled_K = learner_K if reference.temperature == 1 else self.score(reference, None, 1.0)
        self.noise = Agreement.of(engine_K, learner_K).mean
        self.findings.append(
            judge_agreement(
                engine_K,
                learner_K,
                unscaled_K,
                temperature=reference.temperature,
                dtype=reference.dtype,
            )
        )

    async def canary(self, reference: Reference) -> None:
        """Whether an adapter with large known weights does in the engine what it does in the learner."""
        if getattr(self.engine, "swap", "hot_swap") == "none":
            self.say("adapter", "note", "not tried: the engine's weights never change (swap=none)")
            return
        trial = getattr(self.engine, "trial", None)
        if trial is None:
            self.say("adapter", "note", f"not tried: {type(self.engine).__name__} has no trial() of one")
            return
        folder = reference.adapter_dir.absolute() / f"canary-{uuid.uuid4().hex[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        reference.canary(folder)
        try:
            async with trial(folder) as held:
                self.samples = await self.ask(version=held.version)
            fault = next((f for s in self.samples if (f := _fault(s, reference.rows)) is not None), None)
            if fault is not None:
                self.say("adapter", "wrong", f"under an adapter: {fault[0]}", fault[1])
                return
            base_K = self.score(reference, None, reference.temperature)
            adapted_K = self.score(reference, folder, reference.temperature)
        except EngineError as error:
            self.say("adapter", "wrong", f"an adapter could not be served: {error}")
            return
        finally:
            shutil.rmtree(folder)  # nothing names it any more: the trial waits for its last request
        found = judge_adapter(
            self.engine_logprobs(), base_K, adapted_K, noise=self.noise, dtype=reference.dtype
        )
        if found.status == "ok" and Agreement.of(adapted_K, base_K).mean < CANARY_MOVE:
            remedy = f"an untrained model hardly reacts ({CANARY_MOVE} nats are wanted): check it again later"
            found = replace(found, status="note", remedy=remedy)
        self.findings.append(found)

    def engine_logprobs(self) -> Logprobs:
        return np.array([value for sample in self.samples for value in sample.logprobs or ()])

    def score(self, reference: Reference, adapter: object, temperature: float) -> Logprobs:
        """The learner's logprobs of all that was sampled last."""
        prompt = self.prompt
        scored = [
            reference.logprobs(
                [*prompt, *sample.ids],
                len(prompt),
                adapter=adapter,  # type: ignore[arg-type]
                temperature=temperature,
            )
            for sample in self.samples
        ]
        return np.concatenate([np.asarray(values, dtype=np.float64) for values in scored])


def _fault(sample: Completion, rows: int) -> tuple[str, str] | None:
    """Says what is wrong with a sample and what to do, or None."""
    if not sample.ids:
        return "no ids came back", "the server must return token ids (return_token_ids)"
    if sample.trainable is not True:
        return f"it cannot be trained on: {sample.trainable}", "use an engine that returns ids and logprobs"
    if sample.logprobs is None or len(sample.logprobs) != len(sample.ids):
        count = 0 if sample.logprobs is None else len(sample.logprobs)
        return f"{len(sample.ids)} ids came with {count} logprobs", "ask the server for logprobs"
    for position, (value, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
        if not 0 <= value < rows:
            return f"id {value} at position {position} is outside the vocabulary of {rows}", ""
        if not math.isfinite(logprob) or logprob > ROUNDING:
            return f"no usable logprob at position {position}: {logprob}", ""
    return None


def _stop_fault(sample: Completion, stops: frozenset[int]) -> str | None:
    """Says how a sample's end contradicts its stop ids, or None."""
    found = next((place for place, value in enumerate(sample.ids) if value in stops), None)
    if found is not None and found < len(sample.ids) - 1:
        return f"a sample draws stop id {sample.ids[found]} and goes on for {len(sample.ids) - 1 - found} ids"
    full = len(sample.ids) == MOST_IDS  # an engine may name either reason
    if found is not None and sample.finish_reason != "stop" and not full:
        return f"a sample that ends with a stop id ended by {sample.finish_reason}, wanted stop"
    if found is None and sample.finish_reason == "stop":
        return f"a sample of {len(sample.ids)} ids ended by stop without the stop id that it drew"
    return None


def _first_ids(samples: Sequence[Completion]) -> dict[int, float]:
    return {sample.ids[0]: sample.logprobs[0] for sample in samples if sample.ids and sample.logprobs}
