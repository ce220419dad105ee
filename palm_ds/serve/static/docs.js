"use strict";
// /docs: the endpoints of /openapi.json with their fields and an example for curl.

function make(tag, cls, text) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== undefined) element.textContent = text;
  return element;
}

function kind(schema, all) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => kind(each, all)).filter((x) => x !== "null").join(" or ");
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.prefixItems) return `[${schema.prefixItems.map((each) => kind(each, all)).join(", ")}]`;
  if (schema.type === "array") return `list of ${kind(schema.items || {}, all)}`;
  return schema.type || "any";
}

function fields(schema, all) {
  const table = make("table");
  for (const [name, each] of Object.entries(schema.properties || {})) {
    const row = make("tr");
    const needed = (schema.required || []).includes(name);
    row.append(make("td", "", name), make("td", "", kind(each, all)), make("td", "", needed ? "required" : ""),
      make("td", "", each.description || ""));
    table.append(row);
    if (each.items && each.items.$ref) {
      const inner = all[each.items.$ref.split("/").pop()];
      for (const [key, value] of Object.entries(inner.properties || {})) {
        const line = make("tr");
        line.append(make("td", "", `${name}[].${key}`), make("td", "", kind(value, all)), make("td"), make("td", "", value.description || ""));
        table.append(line);
      }
    }
  }
  return table;
}

function example(schema) {
  const body = {};
  for (const [name, each] of Object.entries(schema.properties || {})) {
    if (each.examples) body[name] = each.examples[0];
    else if ((schema.required || []).includes(name)) body[name] = "...";
  }
  return JSON.stringify(body);
}

function named(content, all) {
  const schema = content && content["application/json"] && content["application/json"].schema;
  return schema && schema.$ref ? all[schema.$ref.split("/").pop()] : null;
}

function endpoint(method, path, about, all) {
  const made = make("details", "endpoint card");
  const summary = make("summary");
  summary.append(make("code", "method", method.toUpperCase()), make("code", "", path), ` ${about.description || ""}`);
  made.append(summary);
  const body = named(about.requestBody && about.requestBody.content, all);
  if (body) {
    made.append(make("h3", "", "request"), fields(body, all));
    made.append(make("pre", "", `curl ${location.origin}${path} -H 'Content-Type: application/json' \\\n  -d '${example(body)}'`));
  }
  const answer = named(about.responses["200"] && about.responses["200"].content, all);
  if (answer) made.append(make("h3", "", "answer"), fields(answer, all));
  const errors = Object.keys(about.responses).filter((status) => status !== "200");
  if (errors.length) made.append(make("p", "note", `errors: ${errors.join(", ")}, with a body {"error": {"type", "code", "message", "request_id"}}`));
  return made;
}

fetch("/openapi.json").then((answer) => answer.json()).then((api) => {
  document.getElementById("about").textContent = api.info.description;
  const all = (api.components || {}).schemas || {};
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      document.getElementById("list").append(endpoint(method, path, about, all));
    }
  }
});
