"""What a request asks of its tokens, and choosing them: parameters, processing, keyed sampling."""

from jetspec.sampling.logprobs import Logprob, top_logprobs
from jetspec.sampling.noise import child_seed
from jetspec.sampling.params import LogitsProcessor, SamplingParams
from jetspec.sampling.processors import process
from jetspec.sampling.sample import sample
from jetspec.sampling.stop import StopChecker
from jetspec.sampling.structured import Grammar, StructuredOutputsParams, new_grammar
from jetspec.sampling.words import encode_bad_words

__all__ = [
    "Grammar",
    "LogitsProcessor",
    "Logprob",
    "SamplingParams",
    "StopChecker",
    "StructuredOutputsParams",
    "child_seed",
    "encode_bad_words",
    "new_grammar",
    "process",
    "sample",
    "top_logprobs",
]
