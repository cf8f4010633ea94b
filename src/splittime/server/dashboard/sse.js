/** Server-sent events off a fetch: each `data:` as text, in order, until the stream ends. */

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const pieces = (rest + part.value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) yield piece.replace(/^data: ?/gm, "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
