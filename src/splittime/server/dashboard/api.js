/** Asking the server, with its key if it needs one. The key is kept for this tab only (sessionStorage). */

const KEY = "splittime.key";

export class KeyNeeded extends Error {}

/** An answer that was not 2xx, with the server's own words. */
export class Refused extends Error {
  constructor(status, body) {
    const said = body?.error;
    super(said ? said.message : `the server answered ${status}`);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY);
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** fetch, with the key; raises `KeyNeeded` for a 401 and `Refused` for what else is no success. */
export async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) throw new KeyNeeded("the server needs an API key");
  if (!response.ok) throw new Refused(response.status, await response.json().catch(() => null));
  return response;
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** The steps and the account of one request. */
export function askRequest(id) {
  return askJson(`dashboard/requests/${id.split("/").map(encodeURIComponent).join("/")}`);
}
