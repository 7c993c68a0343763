"""What is deleted goes from the nodes too, and nothing else does."""

from pathlib import Path

from adapter_manager.domain.adapter import WantedTier
from lorikeet.residency.v1 import residency_pb2 as pb
from tests.support.node_stack import ACTIVE, DEMO, DISK, OTHER, stack, tier
from tests.support.waiting import eventually


async def test_what_nobody_registers_is_taken_off_the_node(tmp_path: Path) -> None:
    """Deleted while the node was away: gone when it is back, its disk cache included."""
    async with stack(tmp_path) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await parts.push("demo/b", "b")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        await node.stop()
        await eventually(lambda: not parts.fleet.connected)
        await parts.deletion.delete(DEMO, "a", "")
        await node.start()
        node.held[revision.digest] = pb.ResidentAdapter(digest=revision.digest, tier=DISK)  # from its disk
        await eventually(lambda: revision.digest not in node.held)
        await eventually(lambda: list(node.names()) == ["demo/b"])


async def test_deleting_takes_the_adapter_off_the_nodes_but_not_shared_content(tmp_path: Path) -> None:
    """Another tenant's adapter of the same digest stays where it is."""
    async with stack(tmp_path) as (parts, (node,)):
        revision, _ = await parts.push("demo/a", "same")
        await parts.push("other/b", "same")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        await parts.deletion.delete(DEMO, "a", "")
        assert list(node.names()) == ["other/b"]
        assert tier(node, revision.digest) == ACTIVE
        await parts.deletion.delete(OTHER, "b", "")
        assert revision.digest not in node.held
