"""Denoises a tiny random video over several ranks, and compares it with one rank.

The pipeline is diffusers' own; its transformer's rows, 45 of video, divide into no number of ranks, and neither do its
3 heads. Two guidance branches have prompts of different lengths.

python examples/denoise_video.py                                   # 3 ranks, threads of this process
torchrun --standalone --nproc-per-node 2 examples/denoise_video.py              # 2 ranks, processes: NCCL or gloo
"""

import warnings

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

from megatron_cp.diffusers import enable_context_parallel
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank

STEPS = 5


def pipeline(device: str) -> WanPipeline:
    """Makes a pipeline with the same random weights on every rank."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=24, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    made = WanPipeline(None, None, vae=None, scheduler=scheduler, transformer=model.double().to(device))
    made.set_progress_bar_config(disable=True)
    return made


def denoised(pipe: WanPipeline, device: str) -> Tensor:
    """Returns the latents of a video, from the same noise and prompts on every rank."""
    draw = torch.Generator().manual_seed(1)
    prompt, negative = (torch.randn(1, rows, 16, generator=draw, dtype=torch.float64) for rows in (7, 5))
    noise = torch.randn(1, 4, 3, 6, 10, generator=draw)
    return pipe(
        prompt_embeds=prompt.to(device), negative_prompt_embeds=negative.to(device), latents=noise.to(device),
        num_frames=9, height=48, width=80, num_inference_steps=STEPS, output_type="latent",
    ).frames  # fmt: skip


def main(group: RankGroup, device: str = "cpu") -> float:
    """Denoises over the group and on one rank. Returns how far the two videos are apart."""
    pipe = pipeline(device)
    context = enable_context_parallel(pipe, group)
    video = denoised(pipe, device)
    with context.disabled():
        alone = denoised(pipe, device)
    difference = float((video - alone).abs().max())
    if group.rank == 0:
        print(f"{STEPS} steps over {group.size} ranks and on one rank differ by at most {difference:.1e}")
    return difference


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    if in_torchrun():
        main(start_torchrun_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.destroy_process_group()
    else:
        run_ranks(main, 3)
