// A JSON Schema as people meet it: what a form shows for it, what it starts with, and a table of its fields.
// The server's own engine judges values; nothing here does.

import type { Json, JsonObject, Problem } from "./api";

export const MAX_DEPTH = 12; // of what is made or listed at once; deeper things are made when somebody asks for them
const MAX_ROWS = 500;

export type Value = Json | undefined; // undefined: not sent

export interface Choice {
  value: Json;
  label: string;
}

export interface Variant {
  label: string;
  schema: Json;
}

/** What is to be filled in at one place. */
export interface Shape {
  kind: "string" | "number" | "boolean" | "choice" | "const" | "array" | "object" | "variants" | "any" | "null" | "never";
  schema: JsonObject; // with references followed and `allOf` merged
  nullable: boolean;
  choices: Choice[];
  variants: Variant[];
}

export interface Member {
  name: string;
  schema: Json;
  required: boolean;
}

export const isObject = (it: unknown): it is JsonObject => typeof it === "object" && it !== null && !Array.isArray(it);
const list = (it: unknown): Json[] => (Array.isArray(it) ? it : []);
const words = (it: unknown): string[] => list(it).filter((each): each is string => typeof each === "string");
export const text = (it: unknown): string => (typeof it === "string" ? it : "");
export const number = (it: unknown): number | undefined => (typeof it === "number" ? it : undefined);
/** The beginning of a text, for where there is no room for a button that shows the rest. */
export const short = (it: string, most: number): string => (it.length > most ? `${it.slice(0, most)}…` : it);
export const same = (one: Value, other: Value): boolean => JSON.stringify(one) === JSON.stringify(other);

// Pointers

export const step = (path: string, key: string | number): string => `${path}/${String(key).replace(/~/g, "~0").replace(/\//g, "~1")}`;
const steps = (path: string): string[] =>
  path
    .split("/")
    .slice(1)
    .map((each) => each.replace(/~1/g, "/").replace(/~0/g, "~"));

function at(value: Value, path: string): Value {
  for (const each of steps(path)) {
    if (isObject(value)) value = Object.hasOwn(value, each) ? value[each] : undefined;
    else if (Array.isArray(value)) value = value[Number(each)];
    else return undefined;
  }
  return value;
}

/** Problems where they can be seen: what is missing stands at its own field, and no text begins with its place. */
export function placed(problems: Problem[]): Problem[] {
  return problems.map(({ path, text }) => {
    const start = [`${path}: `, `${path.slice(1)}: `].find((each) => path && text.startsWith(each)) ?? "";
    const said = /^Missing required [^:]+: (.*)$/s.exec(text)?.[1];
    if (said === undefined) return { path, text: text.slice(start.length) };
    const name = path && said.endsWith(` in ${path}`) ? said.slice(0, -4 - path.length) : said;
    return { path: path.endsWith(step("", name)) || name.endsWith("…") ? path : step(path, name), text: "This is required." };
  });
}

// Shapes

function resolved(schema: Json | undefined, root: JsonObject): Json {
  const seen = new Set<string>();
  let now: Json = schema ?? true;
  while (isObject(now) && typeof now.$ref === "string") {
    const { $ref, ...rest }: JsonObject = now;
    const target: Value = seen.has($ref as string) ? undefined : found($ref as string, root);
    seen.add($ref as string);
    if (target === undefined) return { ...rest, "x-unknown": $ref as string };
    now = isObject(target) ? { ...target, ...rest } : target;
  }
  return now;
}

function found(reference: string, root: JsonObject): Value {
  if (reference === "#") return root;
  if (reference.startsWith("#/")) {
    try {
      return at(root, decodeURIComponent(reference.slice(1)));
    } catch {
      return undefined;
    }
  }
  for (const holder of [root.$defs, root.definitions])
    for (const each of isObject(holder) ? Object.values(holder) : [])
      if (isObject(each) && (`#${text(each.$anchor)}` === reference || (each.$id && each.$id === reference))) return each;
  return undefined;
}

const LEAST = new Set(["maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"]);
const MOST = new Set(["minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"]);

/** Two schemas that must both hold, as one; what cannot be merged is the first one's, and the server will say so. */
function both(one: JsonObject, other: JsonObject): JsonObject {
  const made: JsonObject = { ...other, ...one };
  for (const key of Object.keys(other)) {
    const [a, b] = [one[key], other[key]];
    if (a === undefined || b === undefined || same(a, b)) continue;
    if (key === "required") made[key] = [...new Set([...words(a), ...words(b)])];
    else if (key === "properties" && isObject(a) && isObject(b)) {
      const members: JsonObject = { ...b, ...a };
      for (const name of Object.keys(b)) if (name in a) members[name] = { allOf: [a[name]!, b[name]!] };
      made[key] = members;
    } else if (LEAST.has(key)) made[key] = Math.min(Number(a), Number(b));
    else if (MOST.has(key)) made[key] = Math.max(Number(a), Number(b));
    else if (key === "enum") made[key] = list(a).filter((each) => list(b).some((it) => same(it, each)));
    else if (key === "type") {
      const types = [a].flat().filter((each) => [b].flat().some((it) => it === each || (it === "number" && each === "integer")));
      made[key] = types.length === 1 ? types[0]! : types;
    }
  }
  return made;
}

function merged(schema: Json | undefined, root: JsonObject, depth = 0): Json {
  const now = resolved(schema, root);
  if (!isObject(now) || !Array.isArray(now.allOf) || depth > 5) return now;
  const { allOf, ...own } = now;
  return list(allOf).reduce<JsonObject>((made, each) => {
    const part = merged(each, root, depth + 1);
    return isObject(part) ? both(made, part) : made;
  }, own);
}

const HINTS: [string, string[]][] = [
  ["object", ["properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"]],
  ["array", ["items", "prefixItems", "minItems", "maxItems", "uniqueItems"]],
  ["string", ["minLength", "maxLength", "pattern", "format"]],
  ["number", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]],
];

function types(schema: JsonObject): string[] {
  const said = words([schema.type].flat());
  if (said.length) return said;
  return HINTS.filter(([, keys]) => keys.some((key) => key in schema))
    .map(([kind]) => kind)
    .slice(0, 1);
}

export function shape(given: Json | undefined, root: JsonObject, depth = 0): Shape {
  const now = merged(given, root);
  const made: Shape = { kind: "any", schema: isObject(now) ? now : {}, nullable: false, choices: [], variants: [] };
  if (now === false) return { ...made, kind: "never" };
  if (!isObject(now) || depth > MAX_DEPTH) return made;
  if ("const" in now) return { ...made, kind: "const" };
  if (Array.isArray(now.enum))
    return choice(
      made,
      now.enum.map((value, index) => ({ value, label: named(now, index) ?? written(value) })),
    );
  for (const key of ["oneOf", "anyOf"]) {
    if (!Array.isArray(now[key])) continue;
    const { [key]: all, ...own } = now;
    const parts = list(all).map((each) => merged(each, root));
    if (parts.length && parts.every((each) => isObject(each) && ("const" in each || list(each.enum).length === 1)))
      return choice(
        made,
        parts.map((each) => one(each as JsonObject)),
      );
    const others = parts.filter((each) => !(isObject(each) && each.type === "null"));
    const nullable = others.length < parts.length;
    const whole = (part: Json): Json => (isObject(part) ? both(part, own) : part);
    if (others.length === 1) {
      // What stands beside the alternatives says it better than the alternative: the title, the description, the default.
      const inner = shape({ ...(whole(others[0]!) as JsonObject), ...labels(own) }, root, depth + 1);
      return { ...inner, nullable: nullable || inner.nullable };
    }
    if (!others.length) return { ...made, kind: nullable ? "null" : "any" };
    const variants = others.map((each, index) => ({ schema: whole(each), label: titled(each, root, index) }));
    return { ...made, schema: own, kind: "variants", nullable, variants };
  }
  const kinds = types(now).filter((kind) => kind !== "null");
  const nullable = types(now).includes("null");
  if (!kinds.length) return { ...made, kind: nullable ? "null" : "any" };
  if (kinds.length > 1) return { ...made, kind: "variants", nullable, variants: kinds.map((kind) => ({ label: kind, schema: { ...now, type: kind } })) };
  const kind = kinds[0] === "integer" ? "number" : kinds[0];
  const known = ["string", "number", "boolean", "array", "object"].includes(kind!);
  return { ...made, kind: known ? (kind as Shape["kind"]) : "any", nullable, schema: { ...now, type: kinds[0]! } };
}

const labels = (own: JsonObject): JsonObject =>
  Object.fromEntries(["title", "description", "default"].filter((key) => key in own).map((key) => [key, own[key]!]));

function choice(made: Shape, all: Choice[]): Shape {
  const choices = all.filter((each) => each.value !== null);
  return { ...made, kind: "choice", choices, nullable: choices.length < all.length };
}

function one(part: JsonObject): Choice {
  const value = "const" in part ? part.const! : list(part.enum)[0]!;
  const label = text(part.title) || text(part.description);
  return { value, label: label && label !== written(value) ? `${label} (${written(value)})` : written(value) };
}

const named = (schema: JsonObject, index: number): string | undefined => {
  const name = words(schema.enumNames)[index]; // of the first elicitation forms
  return name && name !== written(list(schema.enum)[index]!) ? `${name} (${written(list(schema.enum)[index]!)})` : undefined;
};

function titled(schema: Json, root: JsonObject, index: number): string {
  if (!isObject(schema)) return `variant ${index + 1}`;
  if (text(schema.title)) return text(schema.title);
  const told = Object.entries(isObject(schema.properties) ? schema.properties : {}).find(([, it]) => isObject(it) && "const" in it);
  if (told) return `${told[0]} = ${written((told[1] as JsonObject).const!)}`;
  const kind = types(schema).join(" or ") || `variant ${index + 1}`;
  if (kind === "object" && words(schema.required).length) return `object with ${words(schema.required).join(", ")}`;
  const items = kind === "array" ? merged(schema.items, root) : null;
  return isObject(items) && types(items).length ? `array of ${types(items).join(" or ")}` : kind;
}

export const written = (value: Json): string => (typeof value === "string" ? value : JSON.stringify(value));

/** The named members of an object, and the schema of further ones: false if there must be none. */
export function members(schema: JsonObject): { known: Member[]; more: Json } {
  const needed = new Set(words(schema.required));
  const properties = isObject(schema.properties) ? schema.properties : {};
  const known = Object.entries(properties).map(([name, each]) => ({ name, schema: each, required: needed.has(name) }));
  for (const name of needed) if (!Object.hasOwn(properties, name)) known.push({ name, schema: true, required: true });
  const patterns = isObject(schema.patternProperties) ? Object.values(schema.patternProperties) : [];
  const more = schema.additionalProperties ?? schema.unevaluatedProperties;
  if (patterns.length) return { known, more: patterns.length === 1 && more === false ? patterns[0]! : true };
  return { known, more: more ?? true };
}

/** The schema of the item in a place of an array. */
export function item(schema: JsonObject, index: number): Json {
  const first = Array.isArray(schema.items) ? schema.items : list(schema.prefixItems);
  const rest = Array.isArray(schema.items) ? schema.additionalItems : schema.items;
  return index < first.length ? first[index]! : (rest ?? true);
}

// Values

/** What a form starts with: defaults, what there is no choice about, and nothing that nobody asked for. */
export function initial(schema: Json | undefined, root: JsonObject, needed = true, depth = 0): Value {
  const it = shape(schema, root);
  if ("default" in it.schema) return it.schema.default;
  if (!needed || depth > MAX_DEPTH) return undefined;
  if (it.kind === "const") return it.schema.const;
  if (it.kind === "null") return null;
  if (it.kind === "choice" && it.choices.length === 1 && !it.nullable) return it.choices[0]!.value;
  if (it.kind === "variants") return initial(it.variants[0]!.schema, root, true, depth + 1);
  if (it.kind === "array") {
    const least = Math.min(number(it.schema.minItems) ?? 0, 10);
    return Array.from({ length: least }, (_, index) => fresh(item(it.schema, index), root, depth + 4));
  }
  if (it.kind !== "object") return undefined;
  const made: JsonObject = {};
  for (const each of members(it.schema).known) {
    const value = initial(each.schema, root, each.required, depth + 1);
    if (value !== undefined) made[each.name] = value;
  }
  return made;
}

/** Something to begin with where a person says "add". */
export function fresh(schema: Json | undefined, root: JsonObject, depth = 0): Json {
  const value = initial(schema, root, true, depth);
  if (value !== undefined) return value;
  const it = shape(schema, root);
  if (it.kind === "choice") return it.choices[0]?.value ?? null;
  const made: { [kind: string]: Json } = { string: "", boolean: false, array: [], object: {}, number: least(it.schema) };
  return made[it.kind] ?? null;
}

function least(schema: JsonObject): number {
  const low = number(schema.minimum) ?? number(schema.exclusiveMinimum);
  return low !== undefined && low > 0 ? low : 0;
}

/** Which variant a value is meant as: the one it fits best by its look. */
export function variantOf(value: Value, variants: Variant[], root: JsonObject): number {
  let [best, most] = [0, -1];
  variants.forEach((each, index) => {
    const score = likeness(value, each.schema, root, 0);
    if (score > most) [best, most] = [index, score];
  });
  return best;
}

export const KINDS: { [kind: string]: (value: Value) => boolean } = {
  string: (it) => typeof it === "string",
  number: (it) => typeof it === "number",
  boolean: (it) => typeof it === "boolean",
  array: Array.isArray,
  object: isObject,
  null: (it) => it === null,
};

function likeness(value: Value, schema: Json, root: JsonObject, depth: number): number {
  const it = shape(schema, root);
  if (value === undefined || depth > 4) return 0;
  if (it.kind === "never") return -1;
  if (it.kind === "any") return 0;
  if (it.nullable && value === null) return 1;
  if (it.kind === "const") return same(value, it.schema.const) ? 20 : -1;
  if (it.kind === "choice") return it.choices.some((each) => same(each.value, value)) ? 10 : -1;
  if (it.kind === "variants") return Math.max(...it.variants.map((each) => likeness(value, each.schema, root, depth + 1)));
  if (!KINDS[it.kind]!(value)) return -1;
  if (it.schema.type === "integer" && !Number.isInteger(value)) return -1;
  if (it.kind !== "object") return it.schema.type === "integer" ? 3 : 2;
  const { known, more } = members(it.schema);
  let score = 2;
  for (const each of known) {
    const inner = (value as JsonObject)[each.name];
    if (inner !== undefined) score += 1 + likeness(inner, each.schema, root, depth + 1);
    else if (each.required) score -= 1;
  }
  const extra = Object.keys(value as JsonObject).filter((name) => !known.some((each) => each.name === name));
  return score - (more === false ? 2 * extra.length : 0);
}

/** A value for another schema: members that have the same name and look right there are kept. */
export function carried(value: Value, schema: Json, root: JsonObject): Json {
  const made = fresh(schema, root);
  const it = shape(schema, root);
  if (it.kind !== "object" || !isObject(value) || !isObject(made)) return likeness(value, schema, root, 0) > 0 ? value! : made;
  for (const each of members(it.schema).known) {
    const old = value[each.name];
    if (old !== undefined && shape(each.schema, root).kind !== "const" && likeness(old, each.schema, root, 0) > 0) made[each.name] = old;
  }
  return made;
}

// For reading

export function typeName(given: Json | undefined, root: JsonObject, depth = 0): string {
  const it = shape(given, root);
  const or = it.nullable ? " or null" : "";
  if (it.kind === "const") return JSON.stringify(it.schema.const);
  if (it.kind === "choice") return (words([it.schema.type].flat()).filter((each) => each !== "null")[0] || kindOf(it.choices[0]?.value ?? null)) + or;
  if (it.kind === "variants")
    return depth > 2
      ? "one of several"
      : it.variants
          .map((each) => typeName(each.schema, root, depth + 1))
          .filter((each, index, all) => all.indexOf(each) === index)
          .join(" or ") + or;
  if (it.kind === "array") {
    if (Array.isArray(it.schema.prefixItems) || Array.isArray(it.schema.items)) return `array of fixed places${or}`;
    const inner = depth > 2 || it.schema.items === undefined ? "" : typeName(it.schema.items, root, depth + 1);
    return `array${inner && inner !== "any" ? ` of ${inner}` : ""}${or}`;
  }
  if (it.kind === "never") return "nothing";
  return (it.kind === "number" ? text(it.schema.type) : it.kind) + or;
}

export const kindOf = (value: Value): string => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);

const between = (low: Value, high: Value, noun: string): string[] => {
  const [least, most] = [number(low), number(high)];
  if (least === undefined && most === undefined) return [];
  const many = (count: number) => (count === 1 ? noun.slice(0, -1) : noun);
  if (least !== undefined && least === most) return [`${least} ${many(least)}`];
  if (least === undefined || (least === 0 && most !== undefined)) return [`at most ${most} ${many(most!)}`];
  return [most === undefined ? `at least ${least} ${many(least)}` : `${least} to ${most} ${noun}`];
};

/** What else a value must be, in few words each. */
export function constraints(given: Json | undefined, root: JsonObject): string[] {
  const it = shape(given, root);
  const its = it.schema;
  const said: string[] = [];
  if (it.kind === "choice") said.push(`one of ${it.choices.map((each) => each.label).join(", ")}`);
  if (its.format) said.push(text(its.format));
  if (its.pattern) said.push(`matches ${text(its.pattern)}`);
  said.push(...between(its.minLength, its.maxLength, "characters"), ...between(its.minItems, its.maxItems, "items"));
  said.push(...between(its.minProperties, its.maxProperties, "members"));
  for (const [key, sign] of [
    ["minimum", "≥"],
    ["exclusiveMinimum", ">"],
    ["maximum", "≤"],
    ["exclusiveMaximum", "<"],
  ] as const)
    if (number(its[key]) !== undefined) said.push(`${sign} ${number(its[key])}`);
  if (number(its.multipleOf) !== undefined) said.push(`multiple of ${number(its.multipleOf)}`);
  if (its.uniqueItems === true) said.push("no item twice");
  if (its.contentMediaType || its.contentEncoding) said.push([its.contentMediaType, its.contentEncoding].map(text).join(" "));
  if (its.readOnly === true) said.push("read only");
  if (its.deprecated === true) said.push("deprecated");
  if (text(its["x-mcp-header"])) said.push(`also sent as header Mcp-Param-${text(its["x-mcp-header"])}`);
  if ("x-unknown" in its) said.push(`refers to ${text(its["x-unknown"])}, which is not here`);
  for (const key of ["not", "if", "dependentSchemas", "dependentRequired", "contains", "propertyNames"])
    if (key in its) said.push(`has a condition (${key}), see the JSON`);
  return said;
}

export interface Line {
  depth: number;
  name: string;
  type: string;
  required: boolean;
  default?: Json;
  constraints: string[];
  description: string;
  stopped: boolean; // goes on like one of those above it
}

/** A schema as a table of its fields, nested ones below their parent. */
export function lines(schema: Json, root: JsonObject): Line[] {
  const made: Line[] = [];
  const inside = (given: Json, depth: number, trail: string[]): void => {
    const it = shape(given, root);
    if (it.kind === "object") {
      const { known, more } = members(it.schema);
      for (const each of known) add(each.name, each.schema, each.required, depth, trail);
      if (isObject(more) && Object.keys(more).length) add("any other name", more, false, depth, trail);
    } else if (it.kind === "array") {
      const fixed = Array.isArray(it.schema.items) ? it.schema.items : list(it.schema.prefixItems);
      fixed.forEach((each, index) => add(`[${index}]`, each, false, depth, trail));
      const rest = item(it.schema, fixed.length);
      const inner = shape(rest, root);
      if (fixed.length ? isObject(rest) : inner.kind === "variants" || inner.kind === "array") add("each item", rest, false, depth, trail);
      else if (!fixed.length && inner.kind === "object") inside(rest, depth, trail);
      else if (constraints(rest, root).length || text(inner.schema.description)) add("each item", rest, false, depth, trail);
    } else if (it.kind === "variants" && it.variants.some((each) => ["object", "array"].includes(shape(each.schema, root).kind)))
      it.variants.forEach((each, index) => add(`${index ? "or" : "either"}: ${each.label}`, each.schema, false, depth, trail));
  };
  const add = (name: string, given: Json, required: boolean, depth: number, trail: string[]): void => {
    if (made.length >= MAX_ROWS) return;
    const it = shape(given, root);
    const key = isObject(given) && given.$ref ? text(given.$ref) : JSON.stringify(isObject(given) ? (inner(given) ?? given) : given);
    const stopped = depth >= MAX_DEPTH || (["object", "array", "variants"].includes(it.kind) && trail.includes(key));
    made.push({
      depth,
      name,
      type: typeName(given, root),
      required,
      default: it.schema.default,
      constraints: constraints(given, root),
      description: text(it.schema.description) || (name.endsWith(text(it.schema.title)) ? "" : text(it.schema.title)),
      stopped,
    });
    if (!stopped) inside(given, depth + 1, [...trail, key]);
  };
  inside(schema, 0, ["#"]);
  return made;
}

const inner = (schema: JsonObject): string | undefined => (isObject(schema.items) ? text(schema.items.$ref) || undefined : undefined);
