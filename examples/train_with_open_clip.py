"""open_clip's own trainer, its source untouched, with any method that needs no sample index.

    python examples/train_with_open_clip.py --neuclip-method neuclip --neuclip-options m=2048 rho=6.5 \
        --model ViT-B-32 --dataset-type csv --train-data pairs.csv ...      (all that open_clip_train.main takes)

--neuclip-tau 0.03 holds the temperature there. Under torchrun as open_clip itself: on GPUs.
"""

import argparse
import math
import sys

import open_clip_train.main as trainer
from open_clip_train.distributed import world_info_from_env
from open_clip_train.params import ParseKwargs

import neuclip_lib as nc


def main() -> int | None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--neuclip-method", default="neuclip")
    own.add_argument("--neuclip-options", nargs="*", default={}, action=ParseKwargs)
    own.add_argument("--neuclip-tau", type=float)
    mine, theirs = own.parse_known_args(sys.argv[1:])
    args = trainer.parse_args(theirs)
    _, rank, world_size = world_info_from_env()
    options = {"epochs": args.epochs, "seed": args.seed, **mine.neuclip_options}
    loss = nc.open_clip_loss(mine.neuclip_method, world_size, rank, accumulation=args.accum_freq, **options)
    build = trainer.create_model_and_transforms

    def with_loss(*arguments, **keywords):
        model, *transforms = build(*arguments, **keywords)
        loss.attach(model)  # its state travels in open_clip's checkpoints
        if mine.neuclip_tau is not None:
            model.logit_scale.requires_grad_(False).fill_(-math.log(mine.neuclip_tau))
        return model, *transforms

    trainer.create_model_and_transforms, trainer.create_loss = with_loss, lambda args: loss
    return trainer.main(theirs)


if __name__ == "__main__":
    sys.exit(main())
