// The view that shows which chat format is inferred from a chat template.

function startTemplate() {
  const readBody = () => {
    const template = byId("jinja").value;
    return template.trim() ? { template } : null;
  };
  startForm("template", readBody, "template/inspect", (_, report) =>
    make("pre", { className: "code", textContent: report.text }),
  );
}
