/** The page at /docs: reads openapi.json from the same server and shows it, with a form to try each operation. */

import { KeyNeeded, ask, askJson, storeKey } from "./api.js";
import { byId, el, say, show } from "./dom.js";

const isWidth = (bound) => Math.abs(bound) > Number.MAX_SAFE_INTEGER; // 64 bits: a bound of the format, not of a person's
const BOUNDS = ["minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern"];
const LONG = 40; // characters of a bound that are worth showing

let schemas = {};

const nameOf = (ref) => ref.split("/").pop();
const resolved = (schema) => (schema.$ref ? schemas[nameOf(schema.$ref)] : schema);

/** A type as a reader would write it. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.type === "array") return `[${typeOf(schema.items ?? {})}]`;
  return [].concat(schema.type ?? "any").join(" | ");
}

/** What the server does with the field. */
function treatmentOf(schema) {
  if (schema["x-effect"] === "none") return "no effect";
  const kinds = (schema.anyOf ?? [schema]).filter((kind) => kind.type !== "null");
  const isEmpty = (kind) => kind.maxItems === 0 || [`[""]`, "[false]"].includes(JSON.stringify(kind.enum));
  return kinds.every(isEmpty) ? "refused" : "honoured";
}

function boundsOf(schema) {
  const all = [schema, ...(schema.anyOf ?? [])];
  const told = all.flatMap((one) => BOUNDS.filter((key) => key in one && !isWidth(one[key])).map((key) => `${key} ${one[key]}`));
  return [...new Set(told)].filter((text) => text.length < LONG).join(", ");
}

function table(head, rows) {
  const cells = (tag, texts) => texts.map((text) => el(tag, {}, text));
  const top = el("thead", {}, el("tr", {}, ...cells("th", head)));
  const lines = rows.map(([kind, ...texts]) => el("tr", { class: kind }, ...cells("td", texts)));
  return el("div", { class: "fields-frame" }, el("table", {}, top, el("tbody", {}, ...lines)));
}

const code = (text) => el("code", {}, text);

/** The fields of a body; those that refuse everything come last. */
function bodyTable(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const treatment = treatmentOf(field);
    const meaning = [field.description?.replace("No effect: ", ""), boundsOf(field)].filter(Boolean).join(" · ");
    return [treatment, code(name + (required.includes(name) ? " *" : "")), code(typeOf(field)), treatment, meaning];
  });
  const isLast = (row) => Number(row[0] === "refused");
  return table(["field", "type", "treatment", "meaning"], rows.sort((a, b) => isLast(a) - isLast(b)));
}

function parameterTable(parameters) {
  const row = (one) => ["", code(one.name), code(typeOf(one.schema)), one.in, [one.description, boundsOf(one.schema)].filter(Boolean).join(" · ")];
  return table(["parameter", "type", "in", "meaning"], parameters.map(row));
}

/** An example of a schema's shape, by its types. */
function shapeOf(schema, depth = 0) {
  const whole = resolved(schema);
  if ("const" in whole) return whole.const;
  if (whole.enum) return whole.enum[0];
  if (whole.anyOf) return shapeOf(whole.anyOf[0], depth);
  if (whole.type === "array") return whole.items ? [shapeOf(whole.items, depth + 1)] : [];
  if (whole.type === "object" && depth < 5)
    return Object.fromEntries(Object.entries(whole.properties ?? {}).map(([name, field]) => [name, shapeOf(field, depth + 1)]));
  return { string: "…", integer: 0, number: 0, boolean: false }[whole.type] ?? null;
}

function answers(operation) {
  const lines = Object.entries(operation.responses).map(([status, answer]) => {
    const [kind, content] = Object.entries(answer.content ?? {})[0] ?? [];
    const schema = content?.schema;
    const title = `${status}  ${answer.description}`;
    if (status !== "200" || !schema || kind !== "application/json") return el("p", { class: "note" }, title);
    const shape = JSON.stringify(shapeOf(schema), null, 2);
    return el("details", {}, el("summary", {}, `${title}  ${schema.$ref ? nameOf(schema.$ref) : ""}`), el("pre", {}, shape));
  });
  return [el("h3", {}, "Answers"), ...lines];
}

async function attempt(path, method, body, output) {
  say(output, "…");
  try {
    const options = { method: method.toUpperCase(), headers: { "content-type": "application/json" } };
    if (body !== null) options.body = body;
    const response = await ask(path, options);
    output.textContent = `${response.status}\n`;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    say(output, String(error.message));
  }
}

/** The form that sends it: the body, or what the path leaves open. */
function tryIt(path, method, content) {
  const hole = path.match(/{(.*)}/)?.[1];
  const area = content ? el("textarea", { "aria-label": "Body", spellcheck: "false" }) : null;
  if (area) area.value = JSON.stringify(content.example ?? {}, null, 2);
  const field = hole ? el("input", { "aria-label": hole, placeholder: hole, required: true }) : null;
  const output = el("pre", { "aria-label": "Answer" });
  const send = (event) => {
    event.preventDefault();
    const filled = field ? path.replace(`{${hole}}`, field.value.split("/").map(encodeURIComponent).join("/")) : path;
    attempt(filled.slice(1) || ".", method, area?.value ?? null, output);
  };
  return [el("form", { onsubmit: send }, area, field, el("button", { type: "submit" }, "Try it")), output];
}

function operationOf(path, method, operation) {
  const content = operation.requestBody?.content["application/json"];
  const parts = [el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), code(path), `  ${operation.summary}`)];
  if (operation.description) parts.push(el("p", { class: "note" }, operation.description));
  if (operation.parameters?.length) parts.push(parameterTable(operation.parameters));
  if (content) parts.push(bodyTable(resolved(content.schema)));
  return el("details", { class: "operation" }, ...parts, ...tryIt(path, method, content), ...answers(operation));
}

function typesSection() {
  const names = ["Message", "TextPart", "StreamOptions"].filter((name) => name in schemas);
  const entry = (name) => el("details", { class: "operation" }, el("summary", {}, code(name)), bodyTable(schemas[name]));
  return [el("h2", {}, "Parts of bodies"), ...names.map(entry)];
}

async function load() {
  const state = byId("docs-state");
  try {
    const api = await askJson("openapi.json");
    schemas = api.components.schemas;
    const found = Object.entries(api.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => operationOf(path, method, operation)));
    byId("docs").replaceChildren(...found, ...typesSection());
    say(state, `${found.length} operations, splittime ${api.info.version}`);
    show(byId("docs-key"), false);
  } catch (error) {
    say(state, error.message);
    show(byId("docs-key"), error instanceof KeyNeeded);
  }
}

byId("docs-key").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(event.target.querySelector("input").value);
  load();
});
load();
