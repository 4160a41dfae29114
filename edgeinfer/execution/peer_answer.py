"""Turn what a peer answered into an ending, believing nothing that can be known or checked here.

Of an answer only the tensors are taken, if they are the model's, and the words of closed sets: reports group by these.
When an answer came, and what its times teach, is `offload`'s.
"""

from __future__ import annotations

from edgeinfer import oip
from edgeinfer.artifact.answer import check_outputs, label, max_answer_bytes
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.exchange import Answer
from edgeinfer.request import Expired, Failure, InferRequest, OutcomeKind, Placement, Reason, Refusal, Result

PEER_FAILED = "peer_failed"
"""A failure whose word is none of ours; the detail has it."""

NO_ANSWERS = frozenset({"bad_answer", "wrong_digest"})
"""Failures whose answer was none: a peer that gives several in a row isn't asked for a while."""

FAILURES = frozenset(
    {
        "answer_too_large", "contract_mismatch", "crashed", "input_invalid", "internal", "non_finite_output",
        "out_of_memory", "output_too_large", "output_unsupported", "run_failed", "stopped", "worker_lost",
    }
)  # fmt: skip
"""Why a run next door may fail, in the words of a scheduler and its workers."""


def read_answer(
    request: InferRequest, manifest: Manifest, digest: str, peer: str, answer: Answer
) -> Result | Refusal | Failure | Expired:
    """Return what an answer from `peer` means for `request`, which asked for the bundle of that manifest and digest."""
    match answer.outcome:
        case OutcomeKind.OK | OutcomeKind.LATE:
            if answer.digest != digest:
                return Failure("wrong_digest", f"{peer} answered with bundle {answer.digest[:12]}")
            try:
                return _result(request, manifest, digest, peer, answer)
            except ProtocolError as error:
                return Failure("bad_answer", f"{peer}: {error}")
        case OutcomeKind.REJECTED if answer.reason in set(Reason):
            return Refusal(Reason(answer.reason), f"{peer}: {answer.detail}")
        case OutcomeKind.EXPIRED:
            return Expired(f"{peer}: {answer.detail or answer.reason}")
        case OutcomeKind.FAILED if answer.reason in FAILURES:
            return Failure(answer.reason, f"{peer}: {answer.detail}")
        case _:
            return Failure(PEER_FAILED, f"{peer}: {answer.outcome.value} {answer.reason}: {answer.detail}")


def _result(request: InferRequest, manifest: Manifest, digest: str, peer: str, answer: Answer) -> Result:
    """Return the answer's tensors as a response of our own making.

    Raises:
        ProtocolError: they are not the model's; the text says which, what was expected and what came.
    """
    if (size := len(answer.tensors)) > (most := max_answer_bytes(manifest)):
        raise ProtocolError(f"{size} bytes; {manifest.name} answers with at most {most}")
    if answer.variant not in {variant.name for variant in manifest.variants}:
        raise ProtocolError(f"{manifest.name} has no variant {answer.variant[:64]!r}")
    asked = oip.request_header(request.payload)
    header, payload = oip.decode_response(answer.header, answer.tensors)
    problem = check_outputs(manifest, header, payload, wanted=[output.name for output in asked.outputs])
    if problem is not None:
        raise ProtocolError(problem)
    made = oip.encode_response(
        [
            (output.name, output.datatype, output.shape, raw)
            for output, raw in zip(header.outputs, payload.tensors, strict=True)
        ],
        model=manifest.name,
        version=manifest.version,
        parameters=dict(label(manifest, header, payload)),
        request_id=asked.id,
    )
    return Result(made, Placement.NEARBY, peer, manifest.version, answer.variant, digest)
