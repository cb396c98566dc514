"""The chart of README's results: what equal shares and the plan make of the best GPU alone, drawn
from the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

WIDTH, ROW, BAR, LEFT, TOP = 860, 44, 14, 330, 34
SCALE = 250.0  # pixels for the best GPU alone
_ROW = re.compile(
    r"^\| (.+?) \| (.+?) \| (.+?) \| ([\d,]+) \| \+(\d+) % \| \+(\d+) % \|$", re.MULTILINE
)


class Row(NamedTuple):
    """A row of the table: samples/s of equal shares and of the plan, over those of the best GPU
    alone.
    """

    second: str
    workload: str
    even: float
    plan: float


def read_results(readme: str) -> tuple[Row, ...]:
    """The rows of README's table of results."""
    found = _ROW.findall(readme[readme.index("## Results") :])
    return tuple(
        Row(second, workload, (100 + int(single)) / (100 + int(even)), (100 + int(single)) / 100)
        for second, workload, _, _, even, single in found
    )


def draw_results(rows: tuple[Row, ...]) -> str:
    """The chart as SVG, in colours for dark and light."""
    height = TOP + ROW * len(rows) + 12
    body = "\n".join(
        line for place, row in enumerate(rows) for line in _draw_row(row, TOP + ROW * place)
    )
    return _CHART.format(
        width=WIDTH, height=height, bottom=height - 8, one=LEFT + SCALE, left=LEFT, body=body
    )


def _draw_row(row: Row, top: float) -> Iterator[str]:
    yield f'<text class="name" x="{LEFT - 12}" y="{top + 14}">{escape(row.workload)}</text>'
    yield (
        f'<text class="note" x="{LEFT - 12}" y="{top + 30}">second GPU: {escape(row.second)}</text>'
    )
    for kind, figure, shift in (("even", row.even, 2), ("plan", row.plan, 3 + BAR)):
        end = LEFT + SCALE * figure
        yield (
            f'<rect class="{kind}" x="{LEFT}" y="{top + shift}" width="{end - LEFT:.1f}" '
            f'height="{BAR}"/>'
        )
        yield f'<text class="figure" x="{end + 6:.1f}" y="{top + shift + 11.5}">{figure:.2f}</text>'


_CHART = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Samples/s over those of the best GPU alone: equal shares and the plan</title>
<style>
text{{font:13px system-ui,sans-serif;fill:#1d2530}}
.name{{text-anchor:end;font-weight:600}} .note{{text-anchor:end;font-size:11px;fill:#66717f}}
.figure{{font-size:12px}} .even{{fill:#c9a26b}} .plan{{fill:#15803d}} line{{stroke:#66717f;stroke-dasharray:3 3}}
@media (prefers-color-scheme:dark){{text{{fill:#d3dbe7}} .note{{fill:#93a1b8}}
.even{{fill:#a07c45}} .plan{{fill:#5fd38d}} line{{stroke:#93a1b8}}}}
</style>
<rect class="even" x="{left}" y="6" width="12" height="12"/><text x="348" y="16">equal shares</text>
<rect class="plan" x="430" y="6" width="12" height="12"/><text x="448" y="16">evener's plan</text>
<text x="{one}" y="16" class="figure">1 = best GPU alone</text>
<line x1="{one}" x2="{one}" y1="24" y2="{bottom}"/>
{body}
</svg>
"""  # noqa: E501
