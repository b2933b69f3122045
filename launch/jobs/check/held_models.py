"""The models of a job as ranks hold them: which rank has a shard of which, and whether shards of engines are still what
was built. It knows sections, ranks and engines. It does not know what else a rank must have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.errors import TrtrunError
from trtrun.loading.engine_checksums import compare_shard


def model_sections(config: RuntimeConfig, topology: Topology, rank: int) -> Iterator[tuple[str, ModelSection, bool]]:
    """Both models, and whether this rank holds a shard. Every rank reads both config.json, and rank 0 the tokenizer."""
    if config.draft is not None:
        yield "draft", config.draft, rank in topology.draft_ranks
    yield "target", config.target, rank in topology.target_ranks


def count_engine_bytes(config: RuntimeConfig) -> int:
    """Bytes of all shards of a job's engines; 0 of an engine that cannot be read."""
    total = 0
    for section in (config.target, *((config.draft,) if config.draft is not None else ())):
        with suppress(TrtrunError):
            engine = read_engine(section.model)
            total += sum(shard.bytes for shard in engine.shards) if engine is not None else 0
    return total


def compare_engines(
    config: RuntimeConfig, topology: Topology, rank: int, tell: Callable[[str], None]
) -> tuple[int, tuple[str, ...]]:
    """Read a rank's shards of engines whole, and compare them with what was built.

    Args:
        config: as this rank sees it, with its own model directories.
        topology: of the job.
        rank: this process's world rank.
        tell: called with what comes next.

    Returns:
        Bytes that are what was built; and what is wrong, one text each.
    """
    compared, problems = 0, []
    for name, section, is_held in model_sections(config, topology, rank):
        if not is_held or section.load_format == "dummy":
            continue
        ranks = topology.draft_ranks if name == "draft" else topology.target_ranks
        try:
            engine = read_engine(section.model)
            if engine is None:
                continue
            tell(f"reading the {name}'s shard")
            compared += compare_shard(section.model, engine, ranks.index(rank))
        except TrtrunError as error:
            problems.append(f"{name}: {error}")
    return compared, tuple(problems)
