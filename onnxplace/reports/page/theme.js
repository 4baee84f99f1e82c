// The theme: that of the system until the button asks for light or dark. The palette of page.css is there once, so the
// switch rewrites the condition of its dark part.

function addThemeSwitch(button) {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const dark = rules.find((rule) => rule.media?.mediaText === DARK_QUERY);
  const themes = { System: DARK_QUERY, Light: "not all", Dark: "all" };
  const names = Object.keys(themes);
  let current = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    current = (current + 1) % names.length;
    const name = names[current];
    dark.media.mediaText = themes[name];
    document.documentElement.style.colorScheme = name === "System" ? "" : name.toLowerCase();
    button.textContent = `Theme: ${name.toLowerCase()}`;
    repaintFigures();
  });
}
