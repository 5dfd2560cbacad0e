// A few of Markdown's marks, always as elements and text, never as HTML.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

function element(name, text) {
  const found = document.createElement(name);
  found.textContent = text;
  return found;
}

function prose(text) {
  const found = document.createElement("p");
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    found.append(text.slice(end, match.index));
    found.append(match[1] === undefined ? element("strong", match[2]) : element("code", match[1]));
    end = match.index + match[0].length;
  }
  found.append(text.slice(end));
  return found;
}

function code(lines) {
  const found = document.createElement("pre");
  found.tabIndex = 0; // it scrolls
  found.append(element("code", lines.join("\n")));
  return found;
}

/** Elements for a text: code between ``` lines, headings, `code` and **bold**. */
export function rendered(text) {
  const found = document.createDocumentFragment();
  let block = [];
  let fence = null;
  const close = () => {
    const joined = block.join("\n").replace(/^\n+|\s+$/g, "");
    if (fence !== null) found.append(code(block));
    else if (joined) found.append(prose(joined));
    block = [];
  };
  for (const line of text.split("\n")) {
    const mark = line.match(/^\s*(`{3,})/)?.[1];
    if (fence === null ? mark : mark?.startsWith(fence) && line.trim() === mark) {
      close();
      fence = fence === null ? mark : null;
    } else if (fence === null && /^#{1,6} /.test(line)) {
      close();
      // No heading element: the answer is not part of the page's outline.
      const title = document.createElement("p");
      title.append(element("strong", line.replace(/^#+ /, "").replaceAll("**", "")));
      found.append(title);
    } else if (fence === null && !line.trim()) {
      close();
    } else {
      block.push(line);
    }
  }
  close();
  return found;
}
