"""An index of your own: all keys in bfloat16, half the memory, looked at one after the other.

python examples/own_index.py     # how many of the true best eight it finds; docs/indexes.md names it to memstore
"""

import torch
from torch.nn.functional import pad

from memstore.index import IndexCapabilities, SearchResult, VectorIndex, contract, files, open_index


class HalfIndex(VectorIndex):
    capabilities = IndexCapabilities(exact=False, dense=False)  # float32 keys lose their last digits

    def __init__(self, key_heads, key_dim, keys_per_block, *_, **__):
        self.shape, self.ids = (key_heads, keys_per_block, key_dim), torch.empty(0, dtype=torch.int64)
        self.keys = torch.empty(0, *self.shape, dtype=torch.bfloat16)

    def add(self, ids, keys):
        contract.check_ids(ids)
        contract.check_keys(keys, (len(ids), *self.shape))
        contract.check_new(torch.isin(ids, self.ids), ids)
        self.ids, order = torch.cat([self.ids, ids]).sort()  # equal scores go by id
        self.keys = torch.cat([self.keys, keys.bfloat16()])[order]

    def remove(self, ids):
        contract.check_ids(ids)
        contract.check_held(torch.isin(ids, self.ids), ids)
        self.ids, self.keys = (each[~torch.isin(self.ids, ids)] for each in (self.ids, self.keys))

    def search(self, queries, k, *, allowed=None):
        contract.check_queries(queries, self.shape[0], self.shape[2])
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        rows = slice(None) if allowed is None else contract.allows(allowed, self.ids)
        keys = self.keys[rows].float().repeat_interleave(len(queries) // self.shape[0], 1)
        scores, offsets = torch.einsum("htd,nhpd->htnp", queries.float(), keys).max(3)
        order = scores.argsort(dim=2, descending=True, stable=True)[..., :k]
        found = (scores.gather(2, order), -torch.inf), (self.ids[rows][order], -1), (offsets.gather(2, order), -1)
        return SearchResult(*(pad(each, (0, k - order.shape[2]), value=none) for each, none in found))

    def __len__(self):
        return len(self.ids)

    @property
    def nbytes(self):
        return self.keys.nbytes + self.ids.nbytes

    def save(self, path):
        files.save(path, {"shape": list(self.shape)}, {"ids": self.ids, "keys": self.keys})

    def load(self, path):
        tensors = files.load(path, {"shape": list(self.shape)}).tensors
        self.ids, self.keys = tensors["ids"], tensors["keys"]


def main():
    sizes = {"key_heads": 1, "key_dim": 64, "keys_per_block": 1}
    keys, queries, found = torch.randn(20_000, 1, 1, 64), torch.randn(1, 32, 64), []
    for index in (HalfIndex(**sizes), open_index("exact", **sizes)):
        index.add(torch.arange(len(keys)), keys)
        found.append(index.search(queries, 8).ids)
    print(f"{(found[0][..., None] == found[1][..., None, :]).any(-1).float().mean():.3f} of the true best eight")


if __name__ == "__main__":
    main()
