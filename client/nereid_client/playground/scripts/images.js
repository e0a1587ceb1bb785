// The images of the next message. The user drops them on the page, pastes them, or selects files.

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_IMAGE_BYTES = 20 * 2 ** 20;

/**
 * An image of a message.
 * @typedef {object} AttachedImage
 * @property {string} name The name of the file.
 * @property {string} url A data URL.
 */

/** @type {AttachedImage[]} */
let attachedImages = [];

/** Return a file as a data URL. */
function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Add image files to the next message. For other files, show a message to the user. */
async function attachFiles(files) {
  for (const file of files) {
    if (!IMAGE_TYPES.includes(file.type)) {
      announce(`${file.name} is not a PNG, JPEG, WebP, GIF or BMP image.`);
    } else if (file.size > MAX_IMAGE_BYTES) {
      announce(`${file.name} is larger than 20 MiB.`);
    } else {
      attachedImages.push({ name: file.name, url: await dataUrlOf(file) });
      announce(`The next message contains the image ${file.name}.`);
    }
  }
  showAttachedImages();
}

/** Show the images of the next message, each with a button that removes it. */
function showAttachedImages() {
  const figures = attachedImages.map((image) => {
    const remove = makeButton("Remove", () => {
      attachedImages = attachedImages.filter((other) => other !== image);
      showAttachedImages();
      byId("prompt").focus();
    }, { ariaLabel: `Remove ${image.name}` });
    return make("li", {}, imageElement(image), remove);
  });
  byId("attached").replaceChildren(...figures);
}

/** Return the images of the next message, and remove them from the composer. */
function takeAttachedImages() {
  const images = attachedImages;
  attachedImages = [];
  showAttachedImages();
  return images;
}

/** Return an element that shows an image. */
function imageElement(image) {
  return make("img", { src: image.url, alt: image.name });
}

/** Return the content of a message with images and a text. Without images, return the text. */
function contentWithImages(images, text) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

function startImages() {
  const target = byId("chat");
  const input = byId("image-files");
  input.addEventListener("change", async () => {
    await attachFiles(input.files);
    input.value = "";
  });
  byId("add-images").addEventListener("click", () => input.click());
  byId("prompt").addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (!files.length) return;
    event.preventDefault();
    attachFiles(files);
  });
  target.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    target.classList.add("is-drop-target");
  });
  target.addEventListener("dragleave", (event) => {
    if (!target.contains(event.relatedTarget)) target.classList.remove("is-drop-target");
  });
  target.addEventListener("drop", (event) => {
    target.classList.remove("is-drop-target");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attachFiles(event.dataTransfer.files);
  });
}
