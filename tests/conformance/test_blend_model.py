"""A small model whose prompts are put together from passages that were stored elsewhere, as CacheBlend does it."""

import itertools
import math
import random

import pytest
import torch
from kvrig import blend, tiers
from kvrig.engine import Group
from kvrig.layouts import BLOCK_TOKENS, NUM_BLOCKS, layout
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("on a CPU it copies no segment")

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, WIDTH, VOCABULARY = 4, 4, 2, 32, 128, 512
# Distances that the heads of a layer look at most: near ones, as in text, and in the last layer ones in other passages.
NEAR, FAR = (0, 1, 2, 4), (30, 70, 110, 170)
SHARPNESS, TEMPERATURE = 40.0, 3.0
# Share of found tokens that are computed again, and the layer by whose keys they are chosen.
RECOMPUTED, CHECKED_LAYER = 0.15, 1
# Of the last token's distribution, against the full computation: a seventh of a bit.
LOSS, LOSS_WITHOUT_ROTATION = 0.1, 0.3

PASSAGE, CHUNK = 64, 16


def angles(positions):
    """Cosines and sines of positions, `[position, HEAD_SIZE / 2]` in float64."""
    half = HEAD_SIZE // 2
    turns = positions.double()[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return turns.cos(), turns.sin()


def rotate(heads, positions):
    """Rotary embedding of `[token, head, HEAD_SIZE]` by halves (NeoX)."""
    cos, sin = (part.to(heads.dtype)[:, None] for part in angles(positions))
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def normed(x):
    """RMS norm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Model:
    """Random weights; biases of queries and keys make each head look at tokens about some distance away."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows, columns, gain=1.0):
            return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(rows)

        self.embeddings = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.head = matrix(WIDTH, VOCABULARY, TEMPERATURE)
        signs = torch.randn(KV_HEADS, HEAD_SIZE, generator=generator).sign()
        self.key_bias = signs * math.sqrt(SHARPNESS / math.sqrt(HEAD_SIZE))
        self.layers = []
        for distances in [NEAR] * (LAYERS - 1) + [FAR]:
            queries = rotate(self.key_bias.repeat_interleave(HEADS // KV_HEADS, 0)[:, None], -torch.tensor(distances))
            kv = KV_HEADS * HEAD_SIZE
            weights = [matrix(WIDTH, HEADS * HEAD_SIZE, 0.5), matrix(WIDTH, kv), matrix(WIDTH, kv), matrix(HEADS * HEAD_SIZE, WIDTH)]
            self.layers.append((*weights, matrix(WIDTH, 2 * WIDTH), matrix(2 * WIDTH, WIDTH, 0.5), queries[:, 0]))

    def kv(self, layer, x, positions):
        """Rotated keys, and values, of tokens."""
        _, keys, values, *_ = self.layers[layer]
        heads = lambda weights: (normed(x) @ weights).view(-1, KV_HEADS, HEAD_SIZE)  # noqa: E731
        return rotate(heads(keys) + self.key_bias, positions), heads(values)

    def step(self, layer, x, positions, keys, values):
        """What tokens are after a layer, which read the keys and values of the whole prompt."""
        queries, _, _, out, up, down, bias = self.layers[layer]
        q = rotate((normed(x) @ queries).view(-1, HEADS, HEAD_SIZE) + bias, positions)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_SIZE)
        scores.masked_fill_(torch.arange(len(k)) > positions[:, None], -math.inf)
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1) @ out
        return x + torch.nn.functional.silu(normed(x) @ up) @ down

    def compute(self, prompt):
        """The last token's logits, and keys and values of every layer."""
        x, positions, kv = self.embeddings[prompt], torch.arange(len(prompt)), []
        for layer in range(LAYERS):
            kv.append(self.kv(layer, x, positions))
            x = self.step(layer, x, positions, *kv[-1])
        return normed(x[-1]) @ self.head, kv

    def blend(self, prompt, loaded, found):
        """The logits from loaded keys and values, where `found` says that there are some, and a few tokens computed again."""
        x, positions = self.embeddings[prompt], torch.arange(len(prompt))
        for layer in range(LAYERS):
            if layer == CHECKED_LAYER:
                deviation = (self.kv(layer, x, positions)[0] - loaded[layer][0]).square().sum((1, 2))
                deviation[~found] = math.inf
                count = int((~found).sum() + RECOMPUTED * found.sum())
                positions = deviation.topk(count).indices.sort().values
                x = x[positions]
            keys, values = (part.clone() for part in loaded[layer])
            keys[positions], values[positions] = self.kv(layer, x, positions)
            x = self.step(layer, x, positions, keys, values)
        return normed(x[-1]) @ self.head


def loss(expected, logits):
    """Kullback-Leibler divergence of two distributions, in nats."""
    expected, logits = (part.double().log_softmax(-1) for part in (expected, logits))
    return (expected.exp() * (expected - logits)).sum().item()


class Passages:
    """Passages stored behind prefixes of their own, and prompts that have them in other places."""

    def __init__(self, server, engine, count):
        self.server, self.engine, self.model = server, engine, Model(2)
        self.random = random.Random(7)
        cosines = torch.cat(angles(torch.arange(512)), -1).float()
        assert blend.register_rope(engine, [cosines], HEAD_SIZE) is None
        self.passages, self.stored = [], []
        for number in range(count):
            # Some were further back than they will be.
            start = CHUNK * (1 + 2 * (number % 3))
            prompt = self.text(start) + self.text(PASSAGE)
            self.write(prompt)
            self.passages.append((start, prompt[start:]))
            engine.store_prompt(prompt)
            self.stored.append(self.read(engine.blocks_for(len(prompt)))[:, :, start:])

    def text(self, count):
        """Random tokens."""
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def pages(self):
        """Keys and values of each layer, token by token: `[2, slot, head, value]`."""
        return [tensor.view(2, -1, KV_HEADS, HEAD_SIZE) for tensor, _ in self.engine.worker.layers]

    def slots(self, blocks):
        """Where the tokens of these blocks are."""
        return (torch.tensor(blocks)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()

    def write(self, prompt):
        """Compute a prompt into the first blocks."""
        slots = self.slots(self.engine.blocks_for(len(prompt)))[: len(prompt)]
        for page, kv in zip(self.pages(), self.model.compute(prompt)[1], strict=True):
            page[:, slots] = torch.stack(kv).to(page.dtype)

    def read(self, blocks):
        """`[layer, 2, token, head, value]` of these blocks, as they are in the pages."""
        return torch.stack([page[:, self.slots(blocks)] for page in self.pages()])

    def prompt(self, order, lead=None):
        """A prompt of these passages between new text, `lead` tokens of it before the first, and where each is."""
        prompt, places = self.text(lead or self.random.randrange(1, 22)), []
        for number in order:
            places.append(len(prompt))
            prompt = prompt + self.passages[number][1] + self.text(self.random.randrange(1, 14))
        return prompt, places

    def blended(self, order, lead=None):
        """A prompt, its keys and values from the server (nothing between), which tokens have some, and how many."""
        engine = self.engine
        prompt, places = self.prompt(order, lead)
        request = engine.new_request()
        found = blend.lookup(engine, prompt, request)
        matches = found.non_prefix_segments
        expected = [
            (self.passages[number][0] + chunk, place + chunk)
            for number, place in zip(order, places, strict=True)
            for chunk in range(0, PASSAGE, CHUNK)
        ]
        assert (found.prefix_coverage_tokens, blend.positions(matches)) == (0, expected)
        blocks = self.random.sample(range(1, NUM_BLOCKS), -(-len(prompt) // BLOCK_TOKENS))
        engine.worker.fill(blocks)
        assert blend.retrieve(engine, prompt, request, matches, blocks) is True
        engine.end(request)
        loaded, mask = self.read(blocks)[:, :, : len(prompt)], torch.zeros(len(prompt), dtype=torch.bool)
        for number, place in zip(order, places, strict=True):
            mask[place : place + PASSAGE] = True
            self.check(loaded[:, :, place : place + PASSAGE], number, place)
        assert not loaded[:, :, ~mask].any(), "a token between passages was written"
        return prompt, loaded, mask

    def check(self, loaded, number, place):
        """Values are those that were stored; keys are rotated, with no error but bfloat16's rounding and float32's, and with none
        where they were stored."""
        start, stored = self.passages[number][0], self.stored[number]
        planes = slice(0 if place == start else 1, 2)
        assert torch.equal(loaded[:, planes].view(torch.int16), stored[:, planes].view(torch.int16))
        turns = torch.full((LAYERS * PASSAGE,), place - start)
        keys = rotate(stored[:, 0].double().flatten(0, 1), turns).view(stored[:, 0].shape)
        torch.testing.assert_close(loaded[:, 0].double(), keys, rtol=2**-8, atol=2e-5)

    def unrotated(self, order, mask):
        """Keys and values as a server without rotation would write them."""
        plain = torch.zeros(LAYERS, 2, len(mask), KV_HEADS, HEAD_SIZE)
        plain[:, :, mask] = torch.cat([self.stored[number] for number in order], 2).float()
        return plain


@pytest.fixture
def passages(serve, engines):
    """Passages stored at a server that blends: passages(count)."""

    def store(count):
        server = serve(flags=blend.FLAGS)
        pages = layout("kv_first_nhd", heads=KV_HEADS, size=HEAD_SIZE)
        return Passages(server, engines(server, groups=[Group(pages, layers=LAYERS)]), count)

    return store


# proves: docs/blend.md#requests
def test_blended_prompt_is_nearly_as_computed_in_full(passages):
    """In each order of three passages: the same next token, and nearly its distribution; not so with keys as they were stored."""
    text = passages(3)
    for number, (start, _) in enumerate(text.passages):
        text.blended([number], lead=start)
    losses, others, tokens = [], [], []
    for order in itertools.permutations(range(3)):
        prompt, loaded, mask = text.blended(order)
        expected, kv = text.model.compute(prompt)
        # The keys of the first layer depend on nothing but the token and its position.
        torch.testing.assert_close(loaded[0, 0, mask].float(), kv[0][0][mask], rtol=0, atol=2**-4)
        logits = text.model.blend(prompt, loaded.float(), mask)
        losses.append(loss(expected, logits))
        tokens.append((expected.argmax().item(), logits.argmax().item()))
        others.append(loss(expected, text.model.blend(prompt, text.unrotated(order, mask), mask)))
    print("losses", losses, "without rotation", others)
    assert max(losses) < LOSS and all(full == blended for full, blended in tokens)
    assert min(others) > LOSS_WITHOUT_ROTATION


# proves: docs/blend.md#what-is-found
def test_passages_are_found_query_after_query(passages):
    """500 prompts, each with three of eight passages: all chunks of all of them are found, the last time as the first, whatever
    other tenants look up; and nothing that was blended has become an object."""
    text = passages(8)
    engine = text.engine
    objects = lambda: tiers.metric(text.server, "kvtier_l1_objects")  # noqa: E731
    before = objects()
    for number in range(500):
        prompt, _, _ = text.blended(text.random.sample(range(8), 3))
        if number % 10 == 0:
            assert blend.segments(engine, prompt, "another") == []
            assert engine.hits(prompt) == 0
    wait_until(lambda: tiers.metric(text.server, "kvtier_l1_leased_objects") == 0, 30, "the release of all leases")
    assert objects() == before
