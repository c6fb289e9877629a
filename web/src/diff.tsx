// Where two texts differ, marked for a reader.
import type { Change } from "./api";
import { Pill, Shown } from "./ui";

export interface Piece {
  text: string;
  differs: boolean;
}

const WORDS = /[\p{L}\p{N}_]+|\s+|./gsu;
const MAX_CELLS = 400_000; // of the table; longer texts are marked from the first difference to the last

/** Both texts in pieces, those that the other one does not have marked. */
export function compared(before: string, after: string): [Piece[], Piece[]] {
  const [old, now] = [[...before], [...after]];
  let [start, end] = [0, 0];
  const most = Math.min(old.length, now.length);
  while (start < most && old[start] === now[start]) start++;
  while (end < most - start && old[old.length - 1 - end] === now[now.length - 1 - end]) end++;
  // A number that differs, differs as a whole.
  const digit = (each?: string) => each !== undefined && /[\d.]/.test(each);
  while (start && digit(old[start - 1]) && (digit(old[start]) || digit(now[start]))) start--;
  while (end && digit(old[old.length - end]) && (digit(old[old.length - end - 1]) || digit(now[now.length - end - 1]))) end--;
  const cut = (all: string[]): [string, string, string] =>
    [all.slice(0, start), all.slice(start, all.length - end), all.slice(all.length - end)].map((part) => part.join("")) as [string, string, string];
  const [head, gone, tail] = cut(old);
  const come = cut(now)[1];
  const [left, right] = middle(gone, come);
  const whole = (pieces: Piece[]) => joined([{ text: head, differs: false }, ...pieces, { text: tail, differs: false }]);
  return [whole(left), whole(right)];
}

function middle(gone: string, come: string): [Piece[], Piece[]] {
  const [a, b] = [gone.match(WORDS) ?? [], come.match(WORDS) ?? []];
  if (a.length * b.length > MAX_CELLS || !a.length || !b.length) return [[{ text: gone, differs: true }], [{ text: come, differs: true }]];
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // how long the longest common rest is
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1]! + 1 : Math.max(common[(i + 1) * width + j]!, common[i * width + j + 1]!);
  const [left, right]: [Piece[], Piece[]] = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      left.push({ text: a[i++]!, differs: false });
      right.push({ text: b[j++]!, differs: false });
    } else if (j >= b.length || (i < a.length && common[(i + 1) * width + j]! >= common[i * width + j + 1]!)) left.push({ text: a[i++]!, differs: true });
    else right.push({ text: b[j++]!, differs: true });
  }
  return [left, right];
}

function joined(pieces: Piece[]): Piece[] {
  const made: Piece[] = [];
  for (const each of pieces) {
    const last = made[made.length - 1];
    if (last && last.differs === each.differs) last.text += each.text;
    else if (each.text) made.push({ ...each });
  }
  return made;
}

/** One side of a difference: a word, a sign, and what is not on the other side marked. */
export function Side({ word, pieces, sign }: { word: string; pieces: Piece[]; sign: "−" | "+" }) {
  const Tag = sign === "+" ? "ins" : "del";
  return (
    <div class={`side ${sign === "+" ? "plus" : "minus"} ${pieces.length > 1 ? "mixed" : ""}`}>
      <span class="side-word">
        <span aria-hidden="true">{sign}</span> {word}
      </span>
      <pre tabIndex={0} role="group" aria-label={word}>
        {pieces.length ? (
          pieces.map((each, index) =>
            each.differs ? (
              <Tag key={index}>
                <Shown text={each.text} max={20_000} />
              </Tag>
            ) : (
              <Shown text={each.text} max={20_000} key={index} />
            ),
          )
        ) : (
          <span class="muted">nothing</span>
        )}
      </pre>
    </div>
  );
}

/** One change of a definition: where, of which kind, and both sides of it. */
export function Difference({ change }: { change: Change }) {
  const [before, after] = compared(change.before, change.after);
  return (
    <div class="change">
      <p class="row tight">
        <Pill tone={change.kind === "wording" ? "info" : "warn"} icon="edit">
          <Shown text={change.kind} max={60} />
        </Pill>
        <Shown in="code" text={change.path || "the tool"} max={200} />
      </p>
      <div class="sides">
        <Side word="before" pieces={before} sign="−" />
        <Side word="now" pieces={after} sign="+" />
      </div>
    </div>
  );
}
