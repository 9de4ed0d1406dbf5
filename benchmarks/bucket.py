"""Answers from a memory in a bucket against a local folder: ``python -m benchmarks.bucket``.

A model reads a text into a folder, which is copied into a bucket: a server of the S3 protocol (SeaweedFS) on loopback,
behind a way that lets each request take longer. Then the same answer is generated from the folder and from the bucket,
in turns, each time from a memory that was just opened and holds no state yet. The prompt chooses a list, and with
``every`` tokens another one is chosen; a list is fetched for all layers at once while the first of them compute.

What counts is the tokens after the first, against those from the folder. Answers are alike, so of each token the least
time of all rounds is taken, which leaves out some of what else the machine does. ``wait_ms`` is what an answer waits
longer than the local one, for each list, and ``waits`` the same as a multiple of the delay, beside no delay: with a
delay that is long beside everything else (``--delays 0 2000``) it is how often a list waits for the network, whatever
else the machine does. The way remembers the answers to the round that is not counted, for the
server takes as long as a fast model for each request: so delays are those asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import http.client
import json
import multiprocessing
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.attach import attached_to, long_text
from memstore import Retrieval
from memstore.resources import hardware
from memstore.store.zarr import store as zarr_store
from memstore.tools.models import LoadedModel, load_model
from tests.store.seaweed import BUCKET, HOST, Seaweed

RESULTS = Path(__file__).parent / "results" / "bucket.json"
LOCAL = -1.0
"""The delay that stands for the folder."""
SHARD_BYTES = 1 << 20
"""Shards shorter than the default of 8 MiB, so that so short a text fills several for each layer."""

Row = dict[str, Any]


def main() -> None:
    """Measure and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--new", type=int, default=49, help="tokens of an answer")
    parser.add_argument("--every", type=int, nargs="+", default=[0, 16], help="tokens of a list; 0: the whole answer")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 10, 50], help="milliseconds a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the memory is kept for the next time")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    zarr_store.SHARD_BYTES = SHARD_BYTES  # type: ignore[attr-defined]  # for as long as this process lives
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        spawned = multiprocessing.get_context("spawn")
        delay, asked, port = spawned.Value("d", 0.0), spawned.Value("q", 0), spawned.Queue()
        server = Seaweed(Path(scratch) / "server")
        way = spawned.Process(target=serve, args=(server.port, delay, asked, port), daemon=True)
        way.start()
        os.environ |= server.environment | {"AWS_ENDPOINT_URL": f"http://{HOST}:{port.get()}", "XDG_DATA_HOME": scratch}
        try:
            rows = measured(options, Path(scratch), delay, asked)
        finally:
            way.kill()
            server.close()
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{name: getattr(options, name) for name in ("model", "tokens", "new", "rounds", "threads")},
        "shard_bytes": SHARD_BYTES,
        **hardware(),
        "load": os.getloadavg()[0],
    }
    options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


def measured(options: argparse.Namespace, scratch: Path, delay: Any, asked: Any) -> list[Row]:
    """A row for each number of tokens of a list and each delay."""
    loaded = load_model(options.model)
    ids = long_text(loaded, options.tokens + 256)
    folder = (options.folder or scratch) / f"{options.model}-{options.tokens}"
    with attached_to(loaded, folder, 8) as reader:
        reader.read(ids[: options.tokens], progress=True)
    url = f"zarr+s3://{BUCKET}/notes"
    memstore.copy(folder, url)
    rows = []
    for every in options.every:
        cases = [LOCAL, *options.delays]
        times: dict[float, list[Row]] = {case: [] for case in cases}
        for turn in range(options.rounds + 1):
            for case in cases if turn % 2 else reversed(cases):
                delay.value, before = max(case, 0) / 1e3, asked.value
                place = str(folder) if case == LOCAL else f"{url}?tail={scratch / 'reader'}"
                one = answered(loaded, place, ids[options.tokens - 128 :], every, options.new)
                if turn:  # the first teaches the way, and warms everything
                    times[case].append(one | {"requests": asked.value - before})
        rows += [row(every, case, times, options.new) for case in cases]
        assert len({tuple(one["tokens"]) for some in times.values() for one in some}) == 1, "answers differ"
    return rows


def answered(loaded: LoadedModel, place: str, ids: torch.Tensor, every: int, new: int) -> Row:
    """Seconds to the first token of an answer, and from there to the last; what was fetched."""
    at: list[float] = []

    def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at.append(time.perf_counter())
        return scores

    model: Any = loaded.model
    retrieval = Retrieval(top_k=8, every=every or "segment")
    with (
        memstore.open(place, mode="r") as memory,
        memstore.attach(model, memory, document="text", tokenizer=loaded.tokenizer, retrieval=retrieval),
    ):
        begun, worked = time.perf_counter(), time.process_time()
        made = model.generate(
            ids[None], max_new_tokens=new, min_new_tokens=new, do_sample=False, logits_processor=[note]
        )
        worked = time.process_time() - worked
        tiers = memory.stats()["tiers"]
    return {
        "tokens": made[0, -new:].tolist(),
        "first": at[0] - begun,
        "rest": [later - earlier for earlier, later in pairwise(at)],
        "worked": worked,
        "blocks": tiers["disk"]["hits"],
    }


def row(every: int, case: float, times: dict[float, list[Row]], new: int) -> Row:
    """What the rounds of one case come to, beside those of the folder and those without a delay."""
    own = times[case]
    rest = {each: sum(map(min, zip(*(one["rest"] for one in some), strict=True))) for each, some in times.items()}
    lists = (new - 1) // every if every else 0
    waits = (rest[case] - rest[0]) / lists / case * 1e3 if lists and case > 0 and 0 in rest else None
    return {
        "every": every or "segment",
        "delay_ms": "local" if case == LOCAL else case,
        "tokens_per_s": round((new - 1) / rest[case], 2),
        "of_local": round(rest[LOCAL] / rest[case], 3),
        "wait_ms": round(1e3 * (rest[case] - rest[LOCAL]) / lists, 1) if lists else None,
        "waits": None if waits is None else round(waits, 2),
        "processor_ms_a_token": round(1e3 * min(each["worked"] for each in own) / new, 1),
        "first_token_s": round(min(each["first"] for each in own), 3),
        "blocks": own[0]["blocks"],
        "requests": own[0]["requests"],
    }


def serve(server: int, delay: Any, asked: Any, port: Any) -> None:
    """Be the way to the ``server`` at a port, that waits ``delay`` seconds at each request."""
    known: dict[tuple[str, str], bytes] = {}

    def handed_on(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        line = http.client.HTTPConnection(HOST, server)
        line.request(method, path, body, headers)
        answer = line.getresponse()
        content = answer.read()
        line.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in UNKEPT}
        length = answer.headers.get("Content-Length", "0") if method == "HEAD" else str(len(content))
        head = "".join(f"{name}: {value}\r\n" for name, value in (kept | {"Content-Length": length}).items())
        return f"HTTP/1.1 {answer.status} {answer.reason}\r\n{head}\r\n".encode() + content

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
                method, path, _ = first.split(" ")
                headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
                found = {name.lower(): value for name, value in headers.items()}
                body = await reader.readexactly(int(found.get("content-length", 0)))
                asked.value += 1
                begun, wait = time.perf_counter(), delay.value
                key = path, found.get("range", "")
                answer = known.get(key) if method == "GET" else None
                if answer is None:
                    answer = await asyncio.to_thread(handed_on, method, path, headers, body)
                    if method == "GET" and "/blocks/" in path:  # objects that never change
                        known[key] = answer
                if wait:
                    await asyncio.sleep(max(0.0, wait - (time.perf_counter() - begun)))
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        way = await asyncio.start_server(one, "127.0.0.1", 0, backlog=256)
        port.put(way.sockets[0].getsockname()[1])
        await way.serve_forever()

    asyncio.run(run())


UNKEPT = {"transfer-encoding", "connection", "content-length"}


if __name__ == "__main__":
    main()
