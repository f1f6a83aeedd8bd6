"""Where programs import Run:ai's `distributed_streamer` from."""

from headrace.integrations.runai.distributed_streamer.distributed_streamer import DistributedStreamer

__all__ = ["DistributedStreamer"]
