"""Finds the causal language models of transformers that run over ranks: `python -m tools.transformers_survey`.

Each against the stock class in eager mode on each document alone, in float64: logits and every gradient over two ranks.
Names of classes (`llama`) choose some.
"""

import collections
import copy
import signal
import sys
import warnings

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_cp import Packing
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.transformers_cases import stock, wide, without, worst_gradient

LENGTHS, CLOSE, SECONDS, LARGEST = (19, 1, 26, 7), 1e-6, 40, 30e6
TINY = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "dropout": 0.0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_chunk_size": 8, "use_sliding_window": True,
    "activation_dropout": 0.0, "hidden_dropout": 0.0, "layerdrop": 0.0, "embedding_size": 48, "embed_dim": 48,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0,
    "max_window_layers": 1, "attn_temperature_tuning": False, "decoder_layers": 2, "d_model": 48,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "use_cache": False,
    "rotary_dim": 4,
}  # fmt: skip


def _value(config, name, default=None):
    try:
        return getattr(config, name, default)
    except Exception:  # each layer has its own
        return name


def tiny(kind):
    """Configurations with small numbers where the class has them: some have no head size, some no groups of heads."""
    config = CONFIG_MAPPING[kind]().get_text_config()
    given = {name: value for name, value in TINY.items() if _value(config, name) is not None}
    given |= {"sliding_window": 8} if hasattr(config, "sliding_window") else {}  # of which None is a common default
    size = {"head_dim": 16} if _value(config, "head_dim", "") != "" else {}
    ungrouped = {"num_key_value_heads": 6}
    for more in (size, {}, ungrouped, {**size, **ungrouped}, {**ungrouped, "head_dim": 8}):
        yield type(config), {**given, **more}


def built(kind, tokens):
    """Returns a random model, and the stock class's results for the documents."""
    reasons = []
    for made, given in tiny(kind):
        try:
            config = made(**given)
            config._experts_implementation = "eager"
            with torch.device("meta"):
                size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
            with torch.no_grad():
                for each in model.parameters():
                    each.normal_(0, 0.1) if each.ndim > 1 else each.add_(0.05 * torch.randn_like(each))
            with wide():
                return model, stock(model, Packing(LENGTHS), tokens)
        except TimeoutError:
            raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise ValueError(reasons[0])


def surveyed(kind):
    """Returns the outcome for a model class, and the reason."""
    tokens = torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    try:
        with without("fla", "mamba_ssm", "causal_conv1d"):
            model, (loss, logits, gradients) = built(kind, tokens)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        enable_context_parallel(copy.deepcopy(model), None)
    except ArgumentError as error:
        return "refused when it is enabled", str(error)
    try:
        with wide():
            found = run_ranks(over_ranks, 2, model, tokens)
    except Exception as error:
        return "refused in its first call", f"{type(error).__name__}: {error}"
    off = [abs(sum(each[0] for each in found) - loss), (found[0][1] - logits).abs().max().item()]
    gradient, name = worst_gradient({name: sum(each[2][name] for each in found) for name in gradients}, gradients)
    how = "equal" if max(*off, gradient) < CLOSE else "WRONG"
    return how, f"loss {off[0]:.0e}, logits {off[1]:.0e}, gradient {gradient:.0e} of {name}"


def over_ranks(group, model, tokens):
    """Loss, logits and gradients of a rank."""
    own = copy.deepcopy(model)
    cp = enable_context_parallel(own, group, layout="zigzag", scheme="exact")
    batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(LENGTHS)})
    out = own(**batch, num_items_in_batch=batch.num_items)
    out.loss.backward()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in own.named_parameters()
    }
    return out.loss.item(), cp.gather(out.logits.detach(), batch)[0], gradients


def _stop(*_):
    raise TimeoutError(f"{SECONDS} s")


def main():
    """Prints the table, and each class as it goes."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    found = collections.defaultdict(list)
    for kind in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        signal.alarm(SECONDS)
        try:
            how, why = surveyed(kind)
        except Exception as error:
            how, why = "not built", f"{type(error).__name__}: {error}"
        signal.alarm(0)
        found[how].append(kind)
        print(f"{kind}: {how}: {why}"[:400].replace("\n", " "), file=sys.stderr, flush=True)
    for how, kinds in found.items():
        print(f"| {how} | {len(kinds)} | {', '.join(f'`{kind}`' for kind in sorted(kinds))} |")


if __name__ == "__main__":
    main()
