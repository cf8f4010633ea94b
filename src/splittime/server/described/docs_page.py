"""The page at `/docs`: reads `/openapi.json` from the same server and shows it. One file, no library, no network."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>splittime: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } code, pre, textarea { font: 13px/1.45 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid #eee; padding: .2rem .5rem .2rem 0; }
td { vertical-align: top; } .method { display: inline-block; width: 4.5rem; font-weight: 600; }
textarea { width: 100%; height: 7rem; box-sizing: border-box; } pre { background: #f6f6f6; padding: .6rem; }
pre { overflow: auto; max-height: 24rem; white-space: pre-wrap; } .dim { color: #666; }
</style></head><body>
<h1>splittime</h1><p class="dim">From <a href="/openapi.json">/openapi.json</a>.</p><main></main>
<script>
"use strict";
function make(tag, text, parent) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return "[" + typeOf(schema.items || {}) + "]";
  return [].concat(schema.type || "any").join(" | ");
}
function boundsOf(schema) {
  const shown = ["minimum", "exclusiveMinimum", "maximum", "minItems", "maxItems", "pattern"];
  return shown.filter(key => key in schema).map(key => key + " " + schema[key]).join(", ");
}
function fieldRow(table, name, schema, required, where) {
  const row = make("tr", "", table);
  make("code", name + (required ? " *" : ""), make("td", "", row));
  make("code", typeOf(schema), make("td", "", row));
  make("td", [schema.description, boundsOf(schema), where].filter(Boolean).join(" · "), row);
}
async function attempt(path, method, area, output) {
  output.textContent = "…";
  const options = {method: method.toUpperCase(), headers: {"content-type": "application/json"}};
  if (area) options.body = area.value;
  const response = await fetch(path, options);
  output.textContent = response.status + "\\n";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
}
function show(main, path, method, operation, schemas) {
  const details = make("details", "", main), summary = make("summary", "", details);
  make("span", method.toUpperCase(), summary).className = "method";
  make("code", path, summary);
  make("span", "  " + operation.summary, summary).className = "dim";
  const table = make("table", "", details);
  for (const one of operation.parameters || []) fieldRow(table, one.name, one.schema, one.required, "in " + one.in);
  const body = operation.requestBody && operation.requestBody.content["application/json"].schema;
  const schema = body && body.$ref ? schemas[body.$ref.split("/").pop()] : body;
  for (const [name, field] of Object.entries((schema && schema.properties) || {}))
    fieldRow(table, name, field, (schema.required || []).includes(name), "");
  const area = body ? make("textarea", "", details) : null;
  if (area) area.value = JSON.stringify(EXAMPLES[path] || {}, null, 2);
  const button = make("button", "Try it", details), output = make("pre", "", details);
  button.onclick = () => attempt(path.replace(/{.*}/, () => prompt("id") || ""), method, area, output);
  for (const [status, response] of Object.entries(operation.responses))
    make("div", status + "  " + response.description, details).className = "dim";
}
fetch("/openapi.json").then(response => response.json()).then(api => {
  const main = document.querySelector("main");
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods))
      show(main, path, method, operation, api.components.schemas);
});
</script></body></html>
"""
