"""Make the gallery: pictures and pages of committed histories, screenshots of the pages, and the text.

python -m benchmarks.gallery [--only RECIPE]

Histories are read from ``results/histories/<recipe>.wirings``. Screenshots need Chromium and are skipped without it.
The generated text about the histories is updated, too.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import wirings
from benchmarks import readme
from benchmarks.seen import histories, moment
from wirings import draw, models
from wirings.history import History, snapshot_of
from wirings.train import recipes
from wirings.train.run_history import load_run_history

ROOT = Path(__file__).parents[1]
IMAGES, PAGES = ROOT / "docs" / "images", ROOT / "docs" / "pages"
EXAMPLE = "digits/static-dnw"
"""The history that is drawn in every kind of picture."""
Shot = tuple[int, int, int, bool, str]
"""Width, height, scale, dark mode, and a script to run before the screenshot."""
SHOTS: dict[str, Shot] = {
    "desktop": (1280, 760, 1, False, ""),
    "dark": (1280, 760, 1, True, "wirings.select({node})"),
    "phone": (390, 844, 2, False, ""),
}


def of_history(recipe: str, path: Path) -> None:
    """The page of a history, its screenshots, and pictures of it."""
    history, title, _ = load_run_history(path)
    name = recipe.replace("/", "-")
    page = draw.write_page(history, PAGES / f"{name}.html", title)
    print(f"wrote {page}")
    for of in ("edges", "nodes"):
        draw.save(IMAGES / f"{name}-{of}.png", draw.births_and_deaths, history, size=(6, 3), title=title, of=of)
    if recipe == EXAMPLE:
        of_state(name, history, title)
        draw.save(IMAGES / f"{name}-density.png", draw.density, history, size=(6, 3), title=title)
    record = moment(history)
    screenshots(page, name, record, int(history.state(record).degrees()[0].argmax()))


def of_state(name: str, history: History, title: str) -> None:
    """Draw the final wiring."""
    for picture, size in (("blocks", (8.0, 4.5)), ("adjacency", (5.0, 5.0)), ("degrees", (6.0, 3.6))):
        draw.save(IMAGES / f"{name}-{picture}.png", getattr(draw, picture), history, size=size, title=title)


def screenshots(page: Path, name: str, record: int, node: int, shots: dict[str, Shot] = SHOTS) -> None:
    """Take screenshots of the page: on a desktop, in dark mode with a selected node, and on a phone."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        print("Chromium not found: skipped the screenshots")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for shot, (width, height, scale, dark, act) in shots.items():
            size = {"width": width, "height": height}
            scheme = "dark" if dark else "light"
            tab = browser.new_page(viewport=size, device_scale_factor=scale, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.wait_for_function("() => window.wirings && window.wirings.drawn")
            tab.evaluate(f"wirings.seek({record}); {act.format(node=node)}")
            tab.wait_for_function("() => wirings.resting ?? true")
            tab.wait_for_timeout(200)
            tab.screenshot(path=str(IMAGES / f"{name}-{shot}.png"))
        browser.close()


def others() -> None:
    """Pictures of networks that have no history: the trained one of the package, and networks before training."""
    of_state("trained", load_run_history("table1/static-dnw").history, "table1/static-dnw")
    torch.manual_seed(0)
    discrete = snapshot_of(models.get("tiny_discrete", rule="dnw", edges=2_000))
    title = "discrete time, before training"
    draw.save(IMAGES / "discrete-circle.png", draw.circle, discrete, size=(6.5, 5), title=title)
    draw.save(IMAGES / "discrete-spring.png", draw.spring, discrete, size=(5.5, 5), title=title)
    draw.save(IMAGES / "discrete-adjacency.png", draw.adjacency, discrete, size=(5, 5), title=title)
    residual = snapshot_of(models.get("resnet18", rule="dnw", density=0.1))
    title = "ResNet-18, 10 % of the weights, before training"
    draw.save(IMAGES / "resnet-layers.png", draw.layers, residual, size=(8, 5.5), title=title)
    transformer()
    large = models.get("mobilenetv1_dnw", rule="dnw")
    draw.save(IMAGES / "large-blocks.png", draw.blocks, large, size=(9, 5), title="MobileNetV1-DNW, 5,984 nodes")
    points = []
    for name in recipes.names():
        paper = recipes.get(name).paper or {}
        if name.startswith("table3/") and "mult_adds" in paper:
            line = name.removeprefix("table3/").rpartition("-")[0] or name.removeprefix("table3/")
            points.append(draw.Point(paper["mult_adds"], paper["accuracy"], line))
    title = "ImageNet, Table 3, as the paper reports it"
    draw.save(IMAGES / "table3-paper.png", draw.accuracy_against_mult_adds, points, size=(8, 5), title=title)


def transformer() -> None:
    """The page and the grid of a transformer whose weights do a random walk and in which four heads are made to die."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 8, 256, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    budget = wirings.CubicSchedule(start=0.5, end=0.1, steps=20)
    wiring = wirings.wire_(model, "dnw", density=budget, share="global")
    recorder = wirings.Recorder(wiring, every=1, about={"rule": "dnw"})
    weights = {layer.name: layer.weight for layer in wiring.layers}
    for i in range(1, 31):
        with torch.no_grad():
            for depth, weight in enumerate(weights.values()):
                weight.add_(torch.randn_like(weight) * weight.abs().mean() * 0.1 * (1 + depth / 12))
            if i > 15:
                weights["layers.2.self_attn.in_proj_weight"][136:144] = 0  # values of head 1
                weights["layers.4.self_attn.out_proj.weight"][:, 24:32] = 0  # what is read from head 3
                weights["layers.5.self_attn.in_proj_weight"][:16] = 0  # queries of heads 0 and 1
        wiring.step()
        recorder.step(i, loss=3 / i**0.5)
    history, title = recorder.history(), "an encoder of six blocks"
    draw.save(IMAGES / "transformer-grid.png", draw.transformer, history, size=(11, 3.4), title=title)
    with tempfile.TemporaryDirectory() as folder:
        page = draw.write_page(history, Path(folder) / "page.html", title)
        screenshots(page, "transformer", len(history) - 1, 0, {"page": (1400, 800, 1, False, "")})


def shrink(path: Path) -> None:
    """Reduce a picture to 256 colours, which saves two thirds of its size. Palette pictures are left unchanged."""
    picture = Image.open(path)
    if picture.mode == "P":
        return
    picture = picture.convert("RGB")
    # Keep the most frequent colours exactly; spread the others over the colour space, so that thin dashes keep theirs.
    spread = picture.quantize(192, method=Image.Quantize.MAXCOVERAGE).getpalette()
    often = [colour for _, colour in sorted(picture.getcolors(2**24), reverse=True)[: 256 - len(spread) // 3]]
    palette = np.concatenate([np.array(often), np.reshape(spread, (-1, 3))]).astype(np.float32)
    colours, which = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True)
    nearest = ((palette**2).sum(1) - 2 * colours.astype(np.float32) @ palette.T).argmin(1)
    few = Image.fromarray(nearest[which].astype(np.uint8).reshape(picture.height, picture.width), "P")
    few.putpalette(palette.astype(np.uint8).tobytes())
    few.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="update only the history of this recipe")
    only = parser.parse_args().only
    for recipe, path in histories().items():
        if only in (None, recipe):
            of_history(recipe, path)
    if only is None:
        others()
    for path in IMAGES.glob("*.png"):
        shrink(path)
    (ROOT / "docs" / "gallery.md").write_text(readme.rendered("docs/gallery.md"))


if __name__ == "__main__":
    main()
