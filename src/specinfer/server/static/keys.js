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

// Enter sends, and with Shift starts a new line, or the other way round. A touch keyboard has no Shift to hold.
export function chooseEnter(box) {
  try {
    const kept = localStorage.getItem("specinfer-enter");
    box.checked = kept === null ? !matchMedia("(pointer: coarse)").matches : kept === "send";
  } catch {
    // the page's default holds
  }
  box.addEventListener("change", () => {
    try {
      localStorage.setItem("specinfer-enter", box.checked ? "send" : "line");
    } catch {
      // it holds until the page is left
    }
  });
  return (event) => {
    if (event.isComposing || event.keyCode === 229) return false; // Enter ends a composition; Safari shows the code alone
    return event.ctrlKey || event.metaKey || event.shiftKey !== box.checked;
  };
}

export function watchKeys({ send, sends, stop, steps, tree, prompt }) {
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
    const isWritten = event.ctrlKey || event.metaKey || event.target === prompt;
    if (event.key === "Enter" && isWritten && sends(event)) {
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
