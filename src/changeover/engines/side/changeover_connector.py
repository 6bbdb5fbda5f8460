"""Loaded by vLLM, in vLLM's own environment: writes the hidden states of a request under the name that came with it.

vLLM's own ``ExampleHiddenStatesConnector`` saves for every request, needs a lock file to be read safely, writes
wherever a client says once custom paths are allowed, and pins memory, which ends the engine on a CPU. Here a request
without a name is not saved, a name is a bare one, and a file that is there is whole (temporary name, fsync, rename).

Read in vLLM 0.25.1 and 0.32 (``example_hidden_states_connector.py``). Nothing of Changeover can be imported here.
"""

import os
from pathlib import Path

import torch
from changeover_files import CAPTURE_NAME, write_whole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class ChangeoverConnector(ExampleHiddenStatesConnector):
    """``kv_transfer_params: {"changeover_name": "x.safetensors", "include_output_tokens": true}`` makes the file x:
    ``hidden_states`` [tokens, layers, hidden] and ``token_ids`` [tokens]; the last sampled token was never fed.
    """

    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            path = self._asked_for(request)
            if path is None:
                self._request_filenames.pop(request.req_id, None)
                meta.new_req_filenames.pop(request.req_id, None)
            else:
                self._request_filenames[request.req_id] = path
                meta.new_req_filenames[request.req_id] = path
        return meta

    def _asked_for(self, request):
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        name = (extra.get("kv_transfer_params") or {}).get("changeover_name")
        if not isinstance(name, str) or not CAPTURE_NAME.fullmatch(name):
            return None
        return str(Path(self._storage_path) / name)

    def request_finished(self, request, block_ids):
        # 0.25 takes every request for a named one here, and ends the engine on one that is not
        if request.request_id not in self._request_filenames:
            return False, None
        return super().request_finished(request, block_ids)

    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        copied = _Copied()
        self._req_copy_events[pending.req_id] = copied
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, None)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))

    @staticmethod
    def _write_tensors(tensors, event, filename, lock_fd):
        try:
            event.synchronize()
            path = Path(filename)
            write_whole(path.parent, path.name, tensors)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)


class _Copied:
    """On a CPU the rows are copied at once: an event that is over."""

    def query(self):
        return True

    def synchronize(self):
        return None
