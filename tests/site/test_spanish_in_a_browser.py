"""What scripts write on Spanish pages, in headless Chromium: it is Spanish, and Python knows the page's language."""

from collections.abc import Iterator

import pytest
from tests.site.chromium import Chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

LAB = "phase-00-decode-arithmetic/lab/01-write-the-arithmetic/"
READY = "document.getElementById('playground')?.dataset.state === 'ready'"
TEXTS = "[...document.querySelectorAll('%s')].map((each) => each.textContent)"
LANGUAGE = """import("/assets/browser/python.js").then(async ({ Python }) => {
  const python = new Python([]);
  let language;
  await python.run("import os; post(os.environ['LANGUAGE'])", null, (posted) => (language = posted));
  python.stop();
  return language;
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1400,950") as browser:
        yield browser


def visit(browser: Chromium, url: str) -> None:
    """Come from elsewhere."""
    browser.open("about:blank")
    browser.requests.clear()
    browser.open(url)


def texts(browser: Chromium, selector: str) -> list[str]:
    return list(browser.evaluate(TEXTS % selector))


def test_the_catalogue_is_asked_for_by_spanish_pages_only(browser: Chromium, address: str) -> None:
    for page, times in (("playground/", 0), ("es/playground/", 1)):
        visit(browser, address + page)
        browser.wait_for("document.querySelector('canvas').width > 300")
        assert sum(url.endswith("spanish.json") for url in browser.requests) == times, page


def test_the_playground(browser: Chromium, address: str) -> None:
    visit(browser, f"{address}es/playground/#workload=six&a=static&b=continuous&step=3")
    browser.wait_for(READY)
    assert texts(browser, "[data-pg=numbers-a] dt")[:5] == ["paso", "tiempo", "en espera", "en marcha", "bloques"]
    assert texts(browser, "[data-pg=numbers-a] dd")[:2] == ["3 de 0–13", "3 pasos"]
    assert texts(browser, "[data-pg=scheduler-b] option")[-1] == "sin segundo planificador"
    assert texts(browser, "[data-pg=run], [data-pg=play]") == ["Ejecutar", "Reproducir"]
    (summary,) = texts(browser, "[data-pg=summary]")
    assert summary.startswith("batching estático (fase 5), paso 3 de 0 a 13. calcula B decode; C decode. 3 en espera, ")
    assert "admitidas: D" in summary


def test_an_error_in_a_file_of_ones_own(browser: Chromium, address: str) -> None:
    visit(browser, f"{address}es/")
    browser.evaluate("localStorage.setItem('minicache/labs/phase-07-fairness/scheduler/fair.py', 'x = 1\\ny = 1 / 0')")
    visit(browser, f"{address}es/playground/#workload=six&a=my-fair&b=none")
    browser.wait_for(READY, 150)
    assert texts(browser, "[data-pg=told-a] p") == ["ZeroDivisionError: division by zero fair.py, línea 2"]
    assert texts(browser, "[data-pg=scheduler-a] optgroup option")[0] == "justo (fase 7), el tuyo"
    browser.evaluate("localStorage.clear()")


@pytest.mark.parametrize(("page", "number"), [("playground/", "17,000"), ("es/playground/", "17\u202f000")])
def test_large_numbers_are_written_as_on_the_page(browser: Chromium, address: str, page: str, number: str) -> None:
    visit(browser, f"{address}{page}#workload=thrash&a=thrash&b=none")
    browser.wait_for(READY, 150)
    assert texts(browser, "[data-pg=numbers-a] dd")[-1] == number


def test_the_lab(browser: Chromium, address: str) -> None:
    visit(browser, f"{address}es/{LAB}")
    browser.evaluate("document.querySelector('.mc-open button').click()")
    browser.wait_for("document.querySelector('.mc-lab .cm-content')")
    labels = {"Ejecutar los tests", "Parar", "Cerrar", "Pista", "Restaurar", "Descargar", "Importar"}
    assert labels < set(texts(browser, ".mc-lab button"))
    assert texts(browser, ".mc-status") == ["Tu archivo se queda en este navegador."]
    browser.evaluate("document.querySelector('.mc-run').click()")
    browser.wait_for("!document.querySelector('.mc-run').disabled", 120)
    assert texts(browser, ".mc-results th") == ["tarea", "tests", "puntos"]
    assert texts(browser, ".mc-status")[0].startswith("Tarea 0.2, ")
    assert texts(browser, ".mc-outcome") == ["sin escribir"]
    assert "docs/es/phase-00" in texts(browser, ".mc-results")[0]
    assert texts(browser, ".mc-lab option")[0] == "0.2 Bytes por token"
    browser.evaluate(
        "[...document.querySelectorAll('.mc-lab button')].find((each) => each.textContent === 'Pista').click()"
    )
    assert "Rechaza primero las cantidades incorrectas" in texts(browser, ".mc-lab")[0]


def test_an_endless_loop_in_the_lab(browser: Chromium, address: str) -> None:
    """One Python finds it, and the next one tells it."""
    visit(browser, f"{address}es/phase-02-fragmentation/lab/00-padding-and-buddies/")
    file = "labs/phase-02-fragmentation/memory/reservation.py"
    browser.evaluate(f"localStorage.setItem('minicache/{file}', 'while 1: 1')")
    browser.evaluate("document.querySelector('.mc-open button').click()")
    browser.wait_for("document.querySelector('.mc-lab .cm-content')")
    browser.evaluate("document.querySelector('.mc-run').click()")
    browser.wait_for("!document.querySelector('.mc-run').disabled", 120)
    told = texts(browser, ".mc-results")[0]
    assert "¿bucle sin fin? Sin respuesta en 10 s" in told
    assert f"`while 1: 1` en {file}:1 no termina" in told
    browser.evaluate("localStorage.clear()")


@pytest.mark.parametrize(("page", "language"), [("", "en"), ("es/", "es")])
def test_python_knows_the_language(browser: Chromium, address: str, page: str, language: str) -> None:
    visit(browser, address + page)
    assert browser.evaluate(LANGUAGE, 120) == language


def test_what_has_no_spanish_stays_english(browser: Chromium, address: str) -> None:
    visit(browser, f"{address}es/")
    said = browser.evaluate("import('/assets/browser/say.js').then(({ say }) => say('{count} words', { count: 2 }))")
    assert said == "2 words"
