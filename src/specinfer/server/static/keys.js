// Keys of the keyboard, and light or dark.

const THEMES = ["system", "light", "dark"];

export function openHelp() {
  document.getElementById("help").showModal();
}

function remembered() {
  try {
    return localStorage.getItem("specinfer-theme") ?? "system";
  } catch {
    return "system"; // storage may be forbidden
  }
}

export function chooseTheme(button) {
  const use = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.lastElementChild.textContent = theme;
    button.value = theme;
  };
  use(THEMES.includes(remembered()) ? remembered() : "system");
  button.addEventListener("click", () => {
    use(THEMES[(THEMES.indexOf(button.value) + 1) % THEMES.length]);
    try {
      localStorage.setItem("specinfer-theme", button.value);
    } catch {
      // it holds until the page is left
    }
  });
}

export function watchKeys({ send, stop, steps, tree, prompt }) {
  const actions = {
    ArrowLeft: () => steps.move(-1),
    ArrowRight: () => steps.move(1),
    Home: () => steps.go(0),
    End: () => steps.follow(),
    p: () => steps.toggle(),
    "+": () => tree.zoom(1.25),
    "=": () => tree.zoom(1.25),
    "-": () => tree.zoom(1 / 1.25),
    0: () => tree.zoom(null),
    "/": () => prompt.focus(),
    "?": openHelp,
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
      return;
    }
    if (event.key === "Escape") {
      stop();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select")) return;
    const scrolls = ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) && event.target.closest?.(".output");
    if (event.key in actions && !scrolls) {
      event.preventDefault();
      actions[event.key]();
    }
  });
}
