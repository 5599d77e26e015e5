"""A server under load: many streaming clients at once, some of which leave or read slowly; then forecasts against what came.

    python load.py http://127.0.0.1:8000 --pid PID [--clients 64] [--seconds 60] [--forecasts 50]

The server has to serve the bundled model, on this machine. Needs nothing but Python. Ends with status 1 if an answer differs from
what the same question gets alone, an answer ends other than it should, memory grows by more than 5 %, the longest wait for a first
token is more than three times the usual one, or a server that nobody asks computes; `--strict` also if the median error of a
forecast is more than 20 %. `.ci/load` starts a server and runs it."""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

MODEL = "forebay-demo"
QUESTIONS = [
    "What is 2+2?",
    "What is 3+5?",
    "Tell me a story about a cat.",
    "Tell me a story about a boat and a storm.",
    "What is the capital of France?",
    "Write a short letter to a friend.",
    "Count from one to twenty.",
    "Why is the sky blue?",
]
LENGTHS = [4, 12, 30]
# Of answers that are read to the end at once, so that they say how long one waits.
USUAL, LEAVES, SLOW = "usual", "leaves", "slow"


class Stream:
    """A chat as it comes: call `pieces` once."""

    def __init__(self, base, prompt, tokens, timeout=600):
        url = urlsplit(base)
        self.connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.began = time.monotonic()
        headers = {"content-type": "application/json"}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        self.status = self.response.status
        self.text, self.reason, self.usage, self.done = "", None, None, False
        self.first = self.last = None

    def pieces(self):
        for line in self.response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                assert not self.done, "an answer ends twice"
                self.done = True
                continue
            assert not self.done, "something comes behind the end"
            event = json.loads(data)
            assert "error" not in event, event
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if text:
                    self.last = time.monotonic()
                    self.first = self.first or self.last
                    self.text += text
                    yield text
                if choice["finish_reason"]:
                    assert self.reason is None, "an answer has two reasons for its end"
                    self.reason = choice["finish_reason"]

    def close(self):
        self.connection.close()


def alone(base, prompt, tokens):
    stream = Stream(base, prompt, tokens)
    assert stream.status == 200, stream.response.read()
    for _ in stream.pieces():
        pass
    stream.close()
    assert stream.done and stream.reason in ("stop", "length") and stream.usage
    return stream.text, stream.reason, stream.usage["completion_tokens"]


class Load:
    def __init__(self, base, expected, seconds):
        self.base, self.expected = base, expected
        self.until = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.waits, self.counts, self.failures = [], {}, []

    def client(self, number):
        numbers = random.Random(number)
        while time.monotonic() < self.until and not self.failures:
            kind = numbers.choices([USUAL, LEAVES, SLOW], [70, 15, 15])[0]
            key = numbers.choice(list(self.expected))
            try:
                wait = self.ask(kind, key, numbers)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure of the server
                with self.lock:
                    self.failures.append(f"client {number}, {key}: {type(error).__name__}: {error}")
                return
            with self.lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if wait is not None:
                    self.waits.append(wait)

    def ask(self, kind, key, numbers):
        prompt, tokens = key
        stream = Stream(self.base, prompt, tokens)
        if stream.status in (429, 503):
            stream.response.read()
            stream.close()
            raise AssertionError(f"refused with {stream.status} though there is room for all")
        assert stream.status == 200, stream.response.read()
        leave_after = numbers.randrange(1, 4) if kind == LEAVES else None
        for at, _ in enumerate(stream.pieces()):
            if at == leave_after:
                stream.close()
                return None
            if kind == SLOW:
                time.sleep(0.1)
        stream.close()
        found = (stream.text, stream.reason, stream.usage and stream.usage["completion_tokens"])
        assert stream.done and found == self.expected[key], f"found {found}, alone {self.expected[key]}"
        return stream.first - stream.began if kind == USUAL and stream.first else None


def rss(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(base, pid, clients, seconds):
    expected = {(q, n): alone(base, q, n) for q in QUESTIONS for n in LENGTHS}
    work = Load(base, expected, seconds)
    threads = [threading.Thread(target=work.client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    began, memory = time.monotonic(), []
    told = began
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        memory.append(rss(pid))
        if time.monotonic() - told >= 10:
            told = time.monotonic()
            print(f"  {told - began:.0f} s: {sum(work.counts.values())} answers, {memory[-1] / 1e6:.0f} MB", flush=True)
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    wrong = list(work.failures)
    fifth = max(len(memory) // 5, 1)
    early, late = statistics.median(memory[fifth : 2 * fifth] or memory), statistics.median(memory[-fifth:])
    growth = late / early - 1
    if growth > 0.05:
        wrong.append(f"memory grew by {growth:.1%}, from {early / 1e6:.1f} to {late / 1e6:.1f} MB")
    median, longest = statistics.median(work.waits), max(work.waits)
    if longest > 3 * median:
        wrong.append(f"somebody waited {longest:.2f} s for a first token, others {median:.2f} s")
    print(
        f"{clients} clients, {took:.0f} s: {work.counts} answers; memory {early / 1e6:.1f} MB, at the end {growth:+.1%}; "
        f"first token after {median:.2f} s (median), {longest:.2f} s at most ({longest / median:.2f})"
    )
    # What was left behind is cancelled by now.
    time.sleep(2)
    before = cpu_seconds(pid)
    time.sleep(10)
    idle = (cpu_seconds(pid) - before) / 10
    print(f"nobody asks: {idle:.1%} of a core")
    if idle > 0.01:
        wrong.append(f"a server that nobody asks takes {idle:.1%} of a core")
    return wrong


def forecasts(base, count, strict):
    """Questions one after the other, of many lengths, some asked before."""
    numbers = random.Random(1)
    words = "river boat storm light house garden winter letter music bread stone paper".split()
    asked, errors = [], {"first token": [], "tokens per second": []}
    for at in range(count + 10):
        if asked and numbers.random() < 0.3:
            prompt = numbers.choice(asked)
        else:
            prompt = "Tell me about " + " ".join(numbers.choices(words, k=numbers.randrange(3, 250)))
            asked.append(prompt)
        stream = Stream(base, prompt, numbers.randrange(16, 64))
        assert stream.status == 200, stream.response.read()
        for _ in stream.pieces():
            pass
        stream.close()
        # The first ones are what the server learns from.
        if at < 10 or not stream.first or stream.usage["completion_tokens"] < 4:
            continue
        header = lambda name: float(stream.response.getheader(f"x-forebay-forecast-{name}"))
        first = (header("wait-ms") + header("prefill-ms")) / 1e3
        errors["first token"].append(abs(first / (stream.first - stream.began) - 1))
        speed = (stream.usage["completion_tokens"] - 1) / (stream.last - stream.first)
        errors["tokens per second"].append(abs(header("tokens-per-second") / speed - 1))
    wrong = []
    for what, found in errors.items():
        median = statistics.median(found)
        tenth = sorted(found)[len(found) * 9 // 10]
        print(f"forecast of {what}: off by {median:.1%} (median of {len(found)}), nine of ten by less than {tenth:.0%}")
        if strict and median > 0.2:
            wrong.append(f"the forecast of {what} is off by {median:.1%}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--forecasts", type=int, default=50)
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    wrong = forecasts(args.base, args.forecasts, args.strict) if args.forecasts else []
    wrong += load(args.base, args.pid, args.clients, args.seconds) if args.clients else []
    for what in wrong:
        print(f"FAILED  {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
