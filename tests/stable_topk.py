"""A `topk` for stock models that choose keys: of equal scores torch's own may take any."""

import torch


def first_of_equal(topk):
    """Returns torch's choice of the largest, and of equal ones the first, which torch does not promise."""

    def stable(scores, count, dim=-1, **options):
        if options or dim != -1 or not scores.is_floating_point():
            return topk(scores, count, dim, **options)
        found = scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((found.values[..., :count], found.indices[..., :count]))

    return stable
