"""Names of runs that a person can say: two words and a day."""

from __future__ import annotations

import secrets
import time

_FIRST = (
    "amber ashen bold brave brisk bright calm clear coral crisp deep early fair fast fine firm fresh gentle "
    "glad golden grand green happy humble jolly keen kind late light lively lucky mellow mild neat noble "
    "pale plain proud quick quiet rapid ready rosy round royal ruby sharp silent silver slow smooth snowy "
    "soft solid steady still strong sunny swift tall tidy true vivid warm wide wild wise young"
)

_SECOND = (
    "acorn anchor aspen badger beacon birch bison breeze brook canyon cedar cliff clover comet condor copper "
    "crane creek delta dune eagle elm ember falcon fern finch fjord forest fox garden glacier harbor hawk "
    "hazel heron hill island ivy jasper juniper lake lark laurel lemon lily lynx maple marsh meadow moon "
    "moss oak ocean olive orchid otter owl pebble pine planet poppy prairie quartz raven reef ridge river "
    "robin sage sparrow spruce stone summit swan thistle tiger tulip valley walnut willow wren"
)


def new_run_name() -> str:
    """Return a name such as "calm otter, 18 November 09:20", in UTC; it does not touch any seed of the run."""
    words = f"{secrets.choice(_FIRST.split())} {secrets.choice(_SECOND.split())}"
    now = time.gmtime()
    return f"{words}, {now.tm_mday} {time.strftime('%B %H:%M', now)}"
