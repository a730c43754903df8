"""The drawing in a terminal: rails lead from each node to the nodes that wait for it, within the width, in Unicode or ASCII."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.drawing.picture import picture
from everbeat.domain.drawing.text import SYMBOLS, draw
from everbeat.domain.workflow.states import NodeInfo, NodeState
from tests.domain.drawn_nodes import AT, CHILD, mapped, node


def lines_of(nodes: list[NodeInfo], *, width: int = 80, plain: bool = False, limit: int = 60) -> list[str]:
    drawn = draw(picture(nodes, at=AT, limit=limit), width=width, plain=plain)
    return ["".join(span.text for span in line).rstrip() for line in drawn]


ORDER = [
    node("reserve", state="COMPLETED"),
    node("charge", "reserve", state="RUNNING", attempt=2),
    node("pack", "reserve", state="ENQUEUED"),
    *mapped("measure", "reserve", states={"COMPLETED": 2, "FAILED": 1}),
    node("ship", "charge", "pack"),
    node("report", "ship", "measure", kind="workflow", task_id=CHILD),
]


def test_the_text_drawing_shows_nodes_rails_and_waits() -> None:
    assert lines_of(ORDER) == [
        "✓ reserve  COMPLETED 12 s",
        "├─┬─╮",
        "● │ │ charge  RUNNING 12 s, attempt 2",
        "│ ◔ │ pack  ENQUEUED  waits for a worker",
        "├─╯ │",
        "│   ◔ measure[0..2]  2 COMPLETED, 1 FAILED",
        "○   │ ship  PENDING  waits for charge (RUNNING 12 s, attempt 2), pack (ENQUEUED)",
        "╰───┤",
        "    ○ report  PENDING",
        f"        workflow {CHILD}",
        "        waits for ship (PENDING), measure (ENQUEUED 12 s)",
    ]


def test_the_ascii_drawing_has_the_same_layout() -> None:
    drawn = lines_of(ORDER, plain=True)
    assert all(line.isascii() for line in drawn)
    assert drawn[:4] == [
        "+ reserve  COMPLETED 12 s",
        "|-+-\\",
        "* | | charge  RUNNING 12 s, attempt 2",
        "| > | pack  ENQUEUED  waits for a worker",
    ]


def test_every_state_has_a_distinct_symbol_in_both_alphabets() -> None:
    assert set(SYMBOLS) == set(NodeState)
    assert len(set(SYMBOLS.values())) == len(NodeState)
    nodes = [node(state.value.lower(), state=state.value) for state in NodeState]
    first = {line[0] for line in lines_of(nodes, plain=True)}
    assert len(first) == len(NodeState)


def test_only_symbols_and_states_are_coloured() -> None:
    (line, *_) = draw(picture(ORDER, at=AT), width=80)
    assert [(span.text, span.state) for span in line if span.state is not None] == [
        ("✓", NodeState.COMPLETED),
        ("COMPLETED 12 s", NodeState.COMPLETED),
    ]


def test_chains_are_drawn_by_layer_if_wide_enough_or_one_after_the_other() -> None:
    chains = [
        node(f"{chain}{number}", *([f"{chain}{number - 1}"] if number else []), state="COMPLETED")
        for number in range(3)
        for chain in "abc"
    ]
    wide = [line.replace("│", "").split()[1] for line in lines_of(chains) if "✓" in line]
    assert wide == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    narrow = lines_of(chains, width=44)
    assert [line.split()[1] for line in narrow if "✓" in line] == [
        "a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"
    ]  # fmt: skip
    assert [line[0] for line in narrow[:6]] == ["✓", "│", "✓", "│", "✓", "✓"], "b0 has nothing to do with a2"


def test_layers_are_numbered_if_there_is_no_room_for_rails() -> None:
    fan = [node("a", state="COMPLETED"), *(node(f"b{n}", "a", task=f"t{n}") for n in range(30))]
    fan.append(node("c", *(f"b{n}" for n in range(30))))
    drawn = lines_of(fan)
    assert drawn[0] == "  1  ✓ a  COMPLETED 12 s"
    assert drawn[1] == "  2  ○ b0  PENDING"
    assert drawn[31].startswith("  3  ○ c  PENDING")
    assert "and 27 more" in " ".join(line.strip() for line in drawn[31:])


def test_the_text_drawing_states_how_many_nodes_are_not_drawn() -> None:
    chain = [node("n0"), *(node(f"n{number}", f"n{number - 1}") for number in range(1, 90))]
    assert lines_of(chain)[-1] == "… and 30 more nodes, which are not drawn"


@st.composite
def some_nodes(draw: st.DrawFn) -> list[NodeInfo]:
    """Draw up to 20 nodes, each of which waits for up to four earlier ones."""
    found: list[NodeInfo] = []
    for number in range(draw(st.integers(1, 20))):
        names = [each.name for each in found]
        needs = draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
        name = "n" * draw(st.integers(1, 12)) + str(number)
        found.append(node(name, *sorted(needs), state=draw(st.sampled_from(list(NodeState)))))
    return found


@given(some_nodes(), st.sampled_from([60, 80, 120]))
def test_every_node_has_one_line_within_the_width(nodes: list[NodeInfo], width: int) -> None:
    drawn = lines_of(nodes, width=width)
    assert all(len(line) <= width for line in drawn)
    for each in nodes:
        assert sum(f" {each.name}  {each.state}" in line for line in drawn) == 1


@given(some_nodes())
def test_following_the_rails_finds_exactly_the_edges(nodes: list[NodeInfo]) -> None:
    done = [node(each.name, *each.needs, state="COMPLETED") for each in nodes[:12]]
    found = followed(lines_of(done, width=120))
    assert found == {(parent, each.name) for each in done for parent in each.needs}


def followed(drawn: list[str]) -> set[tuple[str, str]]:
    """Return the edges that a reader sees: each node on a rail leads to the node in which the rail ends."""
    rails: dict[int, set[str]] = {}
    edges: set[tuple[str, str]] = set()
    own, name, above = 0, "", ""
    for line in drawn:
        if "✓" in line:
            own = line.index("✓")
            name = line[own:].replace("│", " ").split()[1]
            ends = rails.pop(own, set()) if above[own : own + 1] in ("│", *"├┤┼╭╮┬") else set()
            rails = {column: whose for column, whose in rails.items() if line[column : column + 1] == "│"}
            edges |= {(parent, name) for parent in ends}
            rails[own] = {name}
            above = line
            continue
        above = line
        standing = {column: set(whose) for column, whose in rails.items()}
        for column, joint in enumerate(line):
            if column != own and joint in "├┤┼╭╮┬":
                standing.setdefault(column, set()).add(name)
        if line[own] in "╰╯┴":
            standing.pop(own)
        rails = standing
    return edges
